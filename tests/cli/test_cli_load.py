"""Parts of the load generator, tested without a server.

The parts are text lengths, calls, arrival times, samples and the metrics page.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_cli.bench import default_metrics_url
from encserve_cli.load import server_view as view
from encserve_cli.load.calls import Call, Expected, Request, make_calls, make_text_calls
from encserve_cli.load.lengths import parse_lengths, read_lengths, real_text_lengths, sample_lengths
from encserve_cli.load.samples import NOT_SENT, LoadResult, Samples, merge_samples, percentile
from encserve_cli.load.schedule import LoadPlan, poisson_times, split_plan
from encserve_cli.load.senders import CallFailed, StreamSender
from encserve_cli.load.workload import workload_of_lengths, workload_of_texts
from encserve_client import ModelInfo, Pooling, ProtocolError
from encserve_proto.v1 import encoder_pb2 as pb

INFO = ModelInfo(
    name="tiny",
    version="1",
    fingerprint="f",
    is_default=True,
    d_model=4,
    n_layers=1,
    n_heads=1,
    vocab_size=10,
    max_sequence_tokens=8,
    has_tokenizer=True,
    special_token_ids=(0, 1, 2),
    pooling="mean",
    l2_normalize=False,
    provider="CPUExecutionProvider",
    precision="float32",
    max_request_sequences=4,
    max_request_tokens=100,
    max_text_bytes=20,
    max_request_bytes=2**20,
    max_response_bytes=2**20,
    ready=True,
    not_ready_reason="",
)
VECTORS = dataclasses.replace(INFO, input_kind="embeddings", has_tokenizer=False, vocab_size=0, special_token_ids=())


def test_lengths_of_real_texts() -> None:
    histogram = real_text_lengths()
    assert sum(histogram.values()) == 14_397
    assert (min(histogram), max(histogram)) == (3, 256)


def test_lengths_are_a_list_or_a_histogram() -> None:
    assert parse_lengths([7, 3, 7]) == {3: 1, 7: 2}
    assert parse_lengths({"about": "x", "histogram": {"7": 2, "3": 1, "9": 0}}) == {3: 1, 7: 2}


@pytest.mark.parametrize(
    "wrong", [[], {}, "3", 3, [0], [1.5], [True], ["x"], {"histogram": {"0": 1}}, {"histogram": {}}]
)
def test_other_lengths_are_refused(wrong: Any, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=f"{path}: lengths must"):
        read_lengths(path)


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 1000), min_size=1), st.integers(1, 500), st.integers(0, 9))
def test_sampled_lengths_have_the_distribution(histogram: dict[int, int], count: int, seed: int) -> None:
    """Each length occurs in proportion to its count in the histogram, with a difference of at most 1.

    Another seed changes only the order of the lengths.
    """
    found = sample_lengths(histogram, count, seed)
    assert len(found) == count
    for length, texts in histogram.items():
        assert abs((found == length).sum() - count * texts / sum(histogram.values())) <= 1
    assert sorted(found) == sorted(sample_lengths(histogram, count, seed + 1))


def test_calls_hold_the_lengths_in_order() -> None:
    """Each call takes the next two lengths of the list. An incomplete last call is dropped.

    The token ids are random ids from the vocabulary, without special tokens. Equal seeds give equal calls.
    """
    asked = Request(sequences_per_call=2, pooling="mean", dtype="float16", model="tiny", version="1")
    calls = make_calls([3, 8, 1, 2, 5], INFO, asked, seed=7)
    assert [(it.sequences, it.tokens, it.lengths) for it in calls] == [(2, 11, (3, 8)), (2, 3, (1, 2))]
    request = pb.EncodeRequest.FromString(calls[0].data)
    assert [len(it.token_ids.ids) for it in request.inputs] == [3, 8]
    assert {token for it in request.inputs for token in it.token_ids.ids} <= set(range(3, 10))
    options = pb.EncodeOptions(
        outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)],
        data_type=pb.DATA_TYPE_FLOAT16,
        truncation=pb.TRUNCATION_REFUSE,
    )
    assert (request.model, request.model_version, request.options) == ("tiny", "1", options)
    assert calls == make_calls([3, 8, 1, 2, 5], INFO, asked, seed=7)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (None, pb.OUTPUT_KIND_TOKENS),
        ("model", pb.OUTPUT_KIND_MODEL_POOLING),
        ("cls", pb.OUTPUT_KIND_CLS),
        ("max", pb.OUTPUT_KIND_MAX),
    ],
)
def test_calls_ask_for_a_pooling(pooling: Pooling | None, kind: pb.OutputKind) -> None:
    [call] = make_text_calls(["one"], INFO, Request(pooling=pooling, truncate=True))
    options = pb.EncodeRequest.FromString(call.data).options
    assert (options.outputs[0].kind, options.truncation) == (kind, pb.TRUNCATION_END)


def test_calls_of_vectors_and_of_texts() -> None:
    [call] = make_calls([3], VECTORS)
    vectors = pb.EncodeRequest.FromString(call.data).inputs[0].embeddings
    assert (vectors.width, len(vectors.data), call.tokens) == (4, 3 * 4 * 4, 3)
    [call] = make_text_calls(["one", "two"], INFO, Request(sequences_per_call=2))
    assert [it.text for it in pb.EncodeRequest.FromString(call.data).inputs] == ["one", "two"]
    assert (call.sequences, call.tokens, call.lengths) == (2, 0, ())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_calls([9], INFO), "lengths must be from 1 to 8"),
        (lambda: make_calls([0], INFO), "lengths must be from 1 to 8"),
        (lambda: make_calls([1], INFO, Request(sequences_per_call=5)), "sequences_per_call must be from 1 to 4"),
        (lambda: make_calls([1], INFO, Request(sequences_per_call=2)), "a call needs 2 sequences; there are only 1"),
        (lambda: make_text_calls(["x" * 21], INFO), r"texts\[0\] has 21 bytes; the server takes at most 20"),
        (lambda: make_text_calls(["x"], VECTORS), "tiny has no tokenizer"),
    ],
)
def test_calls_that_the_model_would_refuse(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_workload_says_what_was_cut() -> None:
    request = Request(sequences_per_call=2)
    found = workload_of_lengths({4: 3, 20: 1}, "somewhere", INFO, request, seed=0)
    assert (found.sequences, found.cut_sequences, found.longest_tokens, found.mean_tokens) == (4096, 1024, 8, 5.0)
    few = workload_of_texts(["one", "two", "three"], "x.txt", INFO, request, seed=0)
    assert (few.sequences, few.kind, few.mean_tokens) == (2, "texts", None)
    with pytest.raises(ValueError, match=r"x.txt must hold at least one line"):
        workload_of_texts([], "x.txt", INFO, request, seed=0)


def answer(lengths: list[int], **changes: Any) -> bytes:
    """Serialize a reply for sequences of these lengths. All its hidden states are zeros.

    `changes` has new values for fields of the reply.
    """
    tensor = {"kind": pb.OUTPUT_KIND_TOKENS, "data_type": pb.DATA_TYPE_FLOAT32, "width": 4, "lengths": lengths}
    tensor["lengths"] = changes.pop("rows", lengths)
    data = np.zeros((sum(lengths), 4), "<f4").tobytes()
    return pb.EncodeResponse(
        fingerprint=changes.pop("fingerprint", "f"),
        outputs=[pb.RaggedTensor(**(tensor | {"data": data} | changes))],  # type: ignore[arg-type]
        sequences=[pb.SequenceInfo(token_count=it, original_token_count=it) for it in lengths],
    ).SerializeToString()


def test_an_answer_is_checked() -> None:
    [call] = make_calls([3, 5], INFO, Request(sequences_per_call=2))
    assert call.check(answer([3, 5])) == 8
    for wrong in (
        b"\xff",
        b"",
        answer([5, 3]),
        answer([3]),
        answer([3, 5], data=b"1234"),
        answer([3, 5], width=2, data=bytes(8 * 2 * 4)),
        answer([3, 5], fingerprint="other"),
        answer([3, 5], data_type=pb.DATA_TYPE_FLOAT16),
        answer([3, 5], rows=[4, 4]),
        answer([3, 5], data=np.full((8, 4), np.nan, "<f4").tobytes()),
    ):
        with pytest.raises(ProtocolError):
            call.check(wrong)


def test_an_answer_of_pooled_rows_is_checked() -> None:
    [call] = make_calls([3, 5], INFO, Request(sequences_per_call=2, pooling="mean", dtype="float16"))
    half: dict[str, Any] = {"data_type": pb.DATA_TYPE_FLOAT16, "data": bytes(2 * 4 * 2)}
    assert call.check(answer([3, 5], rows=[1, 1], **half)) == 8
    with pytest.raises(ProtocolError, match=r"\(3, 5\) rows of 4; wanted \(1, 1\) of 4"):
        call.check(answer([3, 5], **half))


def test_calls_for_what_retrieval_models_make() -> None:
    """A reply with multi-vector or sparse output may have any number of vectors or weights for a text.

    If the number of texts, the width or the size is wrong, the reply is refused.
    """
    info = dataclasses.replace(INFO, multi_vector_width=2, sparse_width=10)
    [call] = make_calls([3, 5], info, Request(sequences_per_call=2, kind="multi_vector"))
    assert pb.EncodeRequest.FromString(call.data).options.outputs[0].kind == pb.OUTPUT_KIND_MULTI_VECTOR
    assert call.check(answer([3, 5], rows=[0, 4], width=2, data=bytes(4 * 2 * 4))) == 8
    for wrong in (
        answer([3, 5], rows=[4], width=2, data=bytes(4 * 2 * 4)),
        answer([3, 5], rows=[0, 4], width=4, data=bytes(4 * 4 * 4)),
        answer([3, 5], rows=[0, 4], width=2, data=bytes(3 * 2 * 4)),
    ):
        with pytest.raises(ProtocolError):
            call.check(wrong)
    [call] = make_text_calls(["one"], info, Request(kind="sparse"))
    assert pb.EncodeRequest.FromString(call.data).options.outputs[0].kind == pb.OUTPUT_KIND_SPARSE
    assert call.check(answer([3], rows=[7], width=1, data=bytes(7 * 4))) == 3
    with pytest.raises(ValueError, match="model tiny gives no sparse"):
        make_text_calls(["one"], INFO, Request(kind="sparse"))


class ScriptedStream:
    """A fake gRPC channel and its only stream. After the first request, the stream sends `data` and ends."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.written = asyncio.Event()
        self.cancelled = False

    def stream_stream(self, path: str) -> Any:
        return lambda **options: self

    async def write(self, data: bytes) -> None:
        self.written.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self.written.wait()
        yield self.data

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize(
    ("data", "label", "text", "ends"),
    [
        (b"\x0a\xff", "WRONG_ANSWER", "the answer is no EncodeStreamResponse", True),
        (
            pb.EncodeStreamResponse(request_id="99").SerializeToString(),
            "WRONG_ANSWER",
            "'99', which nobody asked",
            True,
        ),
        (
            pb.EncodeStreamResponse(
                request_id="1", error=pb.StreamError(code=8, message="full", reason="QUEUE_FULL")
            ).SerializeToString(),
            "RESOURCE_EXHAUSTED QUEUE_FULL",
            "full",
            False,
        ),
    ],
)
async def test_what_is_wrong_on_a_stream_is_said(data: bytes, label: str, text: str, ends: bool) -> None:
    """If a stream's reply is an error or malformed, `send` raises CallFailed.

    After a malformed reply or an unknown request id, `send` also cancels the stream.
    """
    [call] = make_calls([3], INFO)
    stream = ScriptedStream(data)
    sender = StreamSender(stream, {}, 1)  # type: ignore[arg-type]
    with pytest.raises(CallFailed, match=text) as raised:
        await sender.send(call)
    assert (raised.value.label, stream.cancelled) == (label, ends)
    await sender.aclose()


def test_arrivals_are_poisson() -> None:
    """The times of calls are ascending and lie within the duration. Equal seeds give equal times.

    The number of times, and the gaps between them, match a Poisson process.
    """
    times = poisson_times(50, 400, seed=3)
    assert times.tolist() == poisson_times(50, 400, seed=3).tolist()
    assert times.tolist() != poisson_times(50, 400, seed=4).tolist()
    assert 0 <= times[0] < times[-1] < 400
    assert (np.diff(times) > 0).all()
    assert abs(len(times) - 20_000) < 5 * np.sqrt(20_000)
    assert np.diff(times).std() == pytest.approx(np.diff(times).mean(), rel=0.05)
    assert len(poisson_times(0.001, 0.1, seed=0)) == 0


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 100))
def test_processes_share_one_load(concurrency: int, processes: int, n_calls: int) -> None:
    plan = LoadPlan(mode="open", concurrency=concurrency, rate_per_second=30, seed=5)
    parts = split_plan(plan, processes, n_calls)
    assert len(parts) == min(processes, concurrency)
    assert sum(it.concurrency for it in parts) == concurrency
    assert sum(it.rate_per_second for it in parts) == pytest.approx(30)
    assert len({it.seed for it in parts}) == len(parts)
    assert all(it.concurrency >= 1 and 0 <= it.first_call < n_calls for it in parts)


@pytest.mark.parametrize(
    "wrong", [{"concurrency": 0}, {"seconds": 0}, {"warmup_seconds": -1}, {"timeout_seconds": 0}, {"mode": "open"}]
)
def test_a_plan_out_of_bounds(wrong: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"mode": "closed", "concurrency": 1}
    with pytest.raises(ValueError, match="must be >"):
        LoadPlan(**(settings | wrong))


def samples(rows: list[tuple[float, ...]], labels: tuple[str, ...] = ("",), end: float = 20.0) -> Samples:
    return Samples(
        np.array(rows, np.float64).tobytes(), labels, {it: f"about {it}" for it in labels[1:]}, (7, 9), end, 0.5
    )


def merge(*parts: Samples, is_open: bool) -> LoadResult:
    """Merge the samples of processes that repeat two calls. The calls have 1 and 2 sequences.

    The measured time is from 10 s to 20 s.
    """
    return merge_samples(parts, np.array([1, 2]), start=10.0, end=20.0, is_open=is_open)


def test_a_closed_loop_counts_what_ended_in_time() -> None:
    """A call counts if it ends within the measured time.

    A call that ends in the warm-up or after the measured time does not count.
    """
    before, across, inside, after = (8, 8, 9, 0), (9, 9, 11, 0), (12, 12, 12.5, 1), (19, 19, 20.5, 0)
    rows = [(*it, 0, 0) for it in (before, across, inside, after)] + [(13, 13, 13.1, 0, 1, 0), (9, 9, 9.1, 0, 1, 0)]
    result = merge(samples(rows, ("", "UNAVAILABLE")), is_open=False)
    assert (result.calls, result.sequences, result.tokens) == (2, 3, 16)
    assert result.latency_seconds.tolist() == [2.0, 0.5]
    assert result.errors == {"UNAVAILABLE": 1}
    assert result.error_latency_seconds.tolist() == pytest.approx([0.1])
    assert (result.calls_per_second, result.sequences_per_second, result.tokens_per_second) == (0.2, 0.3, 1.6)
    assert len(result.lateness_seconds) == 0
    assert not result.interrupted


def test_an_open_loop_counts_from_when_calls_were_due() -> None:
    """The latency of a call starts at the planned time of the call.

    If the generator sends a call late, the delay is part of the latency.
    """
    late, held = (10, 10.25, 10.5, 0, 0, 0), (11, 14, 14.5, 1, 0, 1)
    answered_late, warm = (19, 19, 26, 0, 0, 0), (9, 9, 10.5, 0, 0, 0)
    unsent = (19.5, 20, 20, 0, 1, 1)
    result = merge(samples([late, held, answered_late, warm, unsent], ("", NOT_SENT)), is_open=True)
    assert result.latency_seconds.tolist() == [0.5, 3.5, 7.0]
    assert result.lateness_seconds.tolist() == [0.25, 0.0]
    assert (result.held_calls, result.errors) == (2, {NOT_SENT: 1})
    assert len(result.error_latency_seconds) == 0, "a call that was never sent has no error latency"
    assert result.calls == 3  # three calls ended between 10 s and 20 s; one of them was due in the warm-up
    assert result.error_examples == {NOT_SENT: f"about {NOT_SENT}"}


def test_processes_are_merged() -> None:
    """Merge two processes that number their error labels differently. The errors of each label are added up.

    The measured time ends when the first process ends.
    """
    one = samples([(11, 11, 12, 0, 1, 0), (11, 11, 13, 0, 2, 0)], ("", "A", "B"))
    two = samples([(11, 11, 12, 0, 1, 0), (11, 11, 12, 1, 0, 0)], ("", "B"), end=15.0)
    result = merge(one, two, is_open=False)
    assert result.errors == {"A": 1, "B": 2}
    assert (result.processes, result.calls, result.seconds, result.interrupted) == (2, 1, 5.0, True)
    assert result.generator_cpu_seconds == 1.0


def test_nothing_measured() -> None:
    result = merge(samples([], end=9.0), is_open=False)
    assert (result.seconds, result.tokens_per_second, result.interrupted) == (0.0, 0.0, True)
    assert result.latency_percentile_seconds(50) is None
    assert percentile(np.arange(1001.0), 99.9) == pytest.approx(999.0)


PAGE = """# TYPE encserve_model_info gauge
encserve_model_info{model="tiny",version="1",fingerprint="f",provider="CPU"} 1
# TYPE encserve_batch_sequences histogram
encserve_batch_sequences_count{model="tiny",version="1"} %(batches)d
encserve_batch_sequences_sum{model="tiny",version="1"} %(sequences)d
encserve_batch_sequences_sum{model="other",version="1"} %(noise)d
# TYPE encserve_stage_seconds histogram
encserve_stage_seconds_count{model="tiny",version="1",stage="queue"} %(sequences)d
encserve_stage_seconds_sum{model="tiny",version="1",stage="queue"} %(noise)d
# TYPE encserve_tokens counter
encserve_tokens_total{model="tiny",version="1"} %(tokens)d
# TYPE encserve_padding_tokens counter
encserve_padding_tokens_total{model="tiny",version="1"} %(padding)d
# TYPE encserve_refused counter
encserve_refused_total{reason="QUEUE_FULL"} %(noise)d
encserve_refused_total{reason="INTERNAL"} 3
# TYPE process_cpu_seconds counter
process_cpu_seconds_total %(noise)d
"""


def page(**numbers: int) -> view.Reading:
    return view.read_page(PAGE % numbers)


def test_the_servers_view_is_a_difference() -> None:
    before = page(batches=10, sequences=20, tokens=100, padding=5, noise=1)
    after = page(batches=14, sequences=30, tokens=190, padding=15, noise=6)
    found = view.difference(before, after, "f", 2.5)
    assert (found.batches, found.sequences, found.tokens, found.seconds) == (4, 10, 90, 2.5)
    assert (found.batch_sequences, found.padding_fraction, found.queue_seconds) == (2.5, 0.1, 0.5)
    assert (found.compute_seconds, found.batch_tokens, found.resident_bytes) == (None, None, None)
    assert (found.refused, found.cpu_seconds) == ({"QUEUE_FULL": 5}, 5.0)
    with pytest.raises(view.MetricsMissing, match="another server"):
        view.difference(before, after, "g", 2.5)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:1/metrics", "http://127.0.0.1:x/"])
def test_no_page(url: str) -> None:
    with pytest.raises(view.MetricsMissing) as raised:
        view.fetch_page(url)
    assert url in str(raised.value)


@pytest.mark.parametrize(
    ("target", "url"),
    [
        ("localhost:50051", "http://localhost:9464/metrics"),
        ("dns:///encoder:50051", "http://encoder:9464/metrics"),
        ("[::1]:50051", "http://[::1]:9464/metrics"),
        ("unix:///run/e.sock", None),
        ("encoder", None),
    ],
)
def test_where_the_metrics_are(target: str, url: str | None) -> None:
    assert default_metrics_url(target) == url


def test_a_call_may_be_made_by_hand() -> None:
    """A script can build a `Call` without `make_calls`, and check a reply with it."""
    request = pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=[3, 4]))])
    call = Call(request.SerializeToString(), 1, 2, (2,), Expected("f", 4))
    assert call.check(answer([2])) == 2
