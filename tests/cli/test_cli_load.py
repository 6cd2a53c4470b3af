"""Tests of the load generator without a server: lengths of texts, calls, times of calls, and results."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_cli.load.calls import Call, Request, random_calls, text_calls
from encserve_cli.load.lengths import read_lengths, real_text_lengths, sample_lengths
from encserve_cli.load.results import NOT_SENT, Load, LoadResult, percentile, summarize
from encserve_client import Pooling
from encserve_client._logic.answers import model_info
from encserve_proto.v1 import encoder_pb2 as pb

INFO = model_info(
    pb.ModelInfo(
        name="tiny",
        version="1",
        d_model=4,
        vocab_size=10,
        max_sequence_tokens=8,
        has_tokenizer=True,
        special_token_ids=(0, 1, 2),
        max_request_sequences=4,
    )
)
VECTORS = dataclasses.replace(INFO, input_kind="embeddings", has_tokenizer=False, vocab_size=0, special_token_ids=())
CALLERS, RATE = Load(concurrency=1), Load(rate_per_second=50, seconds=398, warmup_seconds=2, seed=3)


def test_lengths_of_real_texts() -> None:
    histogram = real_text_lengths()
    assert sum(histogram.values()) == 14_397
    assert (min(histogram), max(histogram)) == (3, 256)


@pytest.mark.parametrize("content", [[7, 3, 7], {"about": "x", "histogram": {"7": 2, "3": 1, "9": 0}}])
def test_lengths_are_a_list_or_a_histogram(content: Any, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps(content))
    assert read_lengths(tmp_path / "lengths.json") == {3: 1, 7: 2}


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
    """The number of samples of each length differs by at most 1 from the length's exact share in the histogram.

    Another seed changes only the order of the lengths.
    """
    found = sample_lengths(histogram, count, seed)
    assert len(found) == count
    for length, texts in histogram.items():
        assert abs((found == length).sum() - count * texts / sum(histogram.values())) <= 1
    assert sorted(found) == sorted(sample_lengths(histogram, count, seed + 1))


def test_calls_have_the_lengths_in_order() -> None:
    """Each call takes the next two lengths of the list. An incomplete last call is dropped.

    The token ids are random ids from the vocabulary, without special tokens. Equal seeds give equal calls.
    """
    asked = Request(sequences_per_call=2, pooling="mean", dtype="float16", model="tiny", version="1")
    calls = random_calls([3, 8, 1, 2, 5], INFO, asked, seed=7)
    assert [(it.sequences, it.tokens) for it in calls] == [(2, 11), (2, 3)]
    request = pb.EncodeRequest.FromString(calls[0].data)
    assert [len(it.token_ids.ids) for it in request.inputs] == [3, 8]
    assert {token for it in request.inputs for token in it.token_ids.ids} <= set(range(3, 10))
    options = pb.EncodeOptions(
        outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)],
        data_type=pb.DATA_TYPE_FLOAT16,
        truncation=pb.TRUNCATION_END,
    )
    assert (request.model, request.model_version, request.options) == ("tiny", "1", options)
    assert calls == random_calls([3, 8, 1, 2, 5], INFO, asked, seed=7)


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
    [call] = text_calls(["one"], [3], INFO, Request(pooling=pooling))
    assert pb.EncodeRequest.FromString(call.data).options.outputs[0].kind == kind


def test_calls_of_vectors_and_of_texts() -> None:
    [call] = random_calls([3], VECTORS)
    vectors = pb.EncodeRequest.FromString(call.data).inputs[0].embeddings
    assert (vectors.width, len(vectors.data), call.tokens) == (4, 3 * 4 * 4, 3)
    [call] = text_calls(["one", "two"], [3, 4], INFO, Request(sequences_per_call=2))
    assert [it.text for it in pb.EncodeRequest.FromString(call.data).inputs] == ["one", "two"]
    assert (call.sequences, call.tokens) == (2, 7)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: random_calls([1], INFO, Request(sequences_per_call=5)), "--sequences-per-call must be from 1 to 4"),
        (lambda: random_calls([1], dataclasses.replace(INFO, vocab_size=3)), "has only special tokens"),
    ],
)
def test_calls_out_of_bounds(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_arrivals_are_poisson() -> None:
    """The times of calls are ascending and lie within the duration. Equal seeds give equal times.

    The number of times, and the gaps between them, match a Poisson process.
    """
    times = RATE.arrival_seconds()
    assert times.tolist() == RATE.arrival_seconds().tolist()
    assert times.tolist() != dataclasses.replace(RATE, seed=4).arrival_seconds().tolist()
    assert 0 <= times[0] < times[-1] < 400
    assert (np.diff(times) > 0).all()
    assert abs(len(times) - 20_000) < 5 * np.sqrt(20_000)
    assert np.diff(times).std() == pytest.approx(np.diff(times).mean(), rel=0.05)
    assert len(Load(rate_per_second=0.001, seconds=0.1, warmup_seconds=0).arrival_seconds()) == 0


def result_of(load: Load, rows: list[tuple[float, ...]], label: str = "UNAVAILABLE", end: float = 20.0) -> LoadResult:
    """Return the result of a load. The measured time starts at 10 s.

    The load has two different calls: call 0 has 1 sequence, and call 1 has 2 sequences. A row has five
    numbers: the times when the call was due, sent and answered, the index of the call, and 1 for a failed call, else 0.
    """
    calls = [Call(b"", 1, 7), Call(b"", 2, 9)]
    table = np.array(rows, np.float64).reshape(-1, 5)
    settings: dict[str, Any] = {"is_interrupted": False, "error_examples": {}, "generator_cpu_seconds": 0.5}
    return summarize(load, calls, table, ["", label], start=10.0, end=end, **settings)


def test_a_call_of_a_caller_counts_if_it_ends_in_the_measured_time() -> None:
    before, across, inside, after = (8, 8, 9, 0), (9, 9, 11, 0), (12, 12, 12.5, 1), (19, 19, 20.5, 0)
    rows = [(*it, 0) for it in (before, across, inside, after)] + [(13, 13, 13.1, 0, 1), (9, 9, 9.1, 0, 1)]
    result = result_of(CALLERS, rows)
    assert (result.calls, result.sequences, result.tokens) == (2, 3, 16)
    assert result.latency_seconds.tolist() == [2.0, 0.5]
    assert result.errors == {"UNAVAILABLE": 1}
    assert result.error_latency_seconds.tolist() == pytest.approx([0.1])
    assert (result.calls_per_second, result.sequences_per_second, result.tokens_per_second) == (0.2, 0.3, 1.6)
    assert len(result.lateness_seconds) == 0


def test_with_a_rate_latencies_start_when_calls_are_due() -> None:
    """If the generator sends a call late, the delay is part of the latency. Unsent calls are errors."""
    late, in_time = (10, 10.25, 10.5, 0, 0), (11, 11, 11.5, 1, 0)
    answered_late, warm, unsent = (19, 19, 26, 0, 0), (9, 9, 10.5, 0, 0), (19.5, np.nan, 20, 0, 1)
    result = result_of(RATE, [late, in_time, answered_late, warm, unsent], NOT_SENT)
    assert result.latency_seconds.tolist() == [0.5, 0.5, 7.0]
    assert result.lateness_seconds.tolist() == [0.25, 0.0, 0.0]
    assert result.errors == {NOT_SENT: 1}
    assert len(result.error_latency_seconds) == 0
    assert result.calls == 3  # three calls ended between 10 s and 20 s, and one call was due in the warm-up


def test_a_result_without_calls() -> None:
    result = result_of(CALLERS, [], end=9.0)
    assert (result.seconds, result.tokens_per_second) == (0.0, 0.0)
    assert percentile(result.latency_seconds, 50) is None
    assert percentile(np.arange(1001.0), 99.9) == pytest.approx(999.0)
