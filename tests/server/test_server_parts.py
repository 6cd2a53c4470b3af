"""The small parts: settings, flags, tokenizing, outputs, the status table, logs, CPUs."""

import asyncio
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from fake_server import LONGEST, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server import errors
from encserve_server.__main__ import main
from encserve_server.engine.base import BatchResult
from encserve_server.errors import BundleError, EncserveError, InvalidField, QueueFull
from encserve_server.http import status as http_status
from encserve_server.models.pooling import ModelVector, make_outputs
from encserve_server.models.spans import POOLINGS
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.repository import loading
from encserve_server.rpc import status, wire
from encserve_server.settings import Settings
from encserve_server.system import cpus
from encserve_server.telemetry import logs
from encserve_server.types import (
    DataType,
    ModelPooling,
    Numbers,
    Output,
    OutputArrays,
    OutputKind,
    Rows,
    TokenIds,
    TokenizedText,
)


def subclasses(base: type[EncserveError]) -> set[type[EncserveError]]:
    return {base, *(found for sub in base.__subclasses__() for found in subclasses(sub))}


def test_every_error_that_a_caller_can_get_is_in_the_tables() -> None:
    """A new class must be given a status code of each protocol."""
    never_raised_to_callers = {EncserveError, errors.RequestError, *subclasses(errors.StartupError)}
    assert set(http_status.ERROR_TABLE) == subclasses(EncserveError) - never_raised_to_callers
    assert set(status.ERROR_TABLE) == set(http_status.ERROR_TABLE) - {http_status.EmptyInputs, http_status.UnknownField}


def test_reasons_are_unique() -> None:
    assert len(set(status.REASONS)) == len(status.REASONS)


def test_codes_are_written_as_dashboards_expect() -> None:
    labels = {status.code_label(code) for code in grpc.StatusCode}
    assert {"OK", "Canceled", "InvalidArgument", "ResourceExhausted", "DeadlineExceeded"} <= labels


def test_what_a_caller_sees_fits_into_trailers() -> None:
    failure = status.to_failure(InvalidField("inputs", "x" * 100_000))
    assert sum(len(key) + len(value) for key, value in failure.trailers) + len(failure.text) < 8192


def test_only_a_refusal_that_may_pass_says_when_to_try_again() -> None:
    assert status.to_failure(InvalidField("a", "b")).retry_delay_s is None
    assert status.to_failure(QueueFull("tokens", 1, 2, 3, 0.25)).trailers[-1] == ("grpc-retry-pushback-ms", "250")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"grpc_port": 70000}, "grpc_port must be <= 65535; was 70000"),
        ({"max_queue_tokens": 0}, "max_queue_tokens must be >= 1; was 0"),
        ({"max_padding_fraction": 2.0}, "max_padding_fraction must be <= 1; was 2.0"),
        ({"stall_seconds": float("nan")}, "stall_seconds must be finite; was nan"),
        ({"grace_seconds": float("inf")}, "grace_seconds must be finite; was inf"),
        ({"host": ""}, "host must not be empty"),
        ({"grpc_port": 9464}, "grpc_port and metrics_port must differ; both were 9464"),
        ({"precision": "bfloat16"}, "precision bfloat16 needs engine openvino"),
        ({"engine": "openvino", "device": "cuda"}, "device cuda needs engine onnxruntime"),
    ],
)
def test_a_bad_setting_is_named_with_its_bounds(value: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Settings(model_repository=Path(), **value)  # type: ignore[arg-type]


def test_defaults_by_device() -> None:
    settings = Settings(model_repository=Path())
    assert (settings.batch_tokens_for("cpu"), settings.batch_tokens_for("cuda")) == (512, 16384)
    assert settings.padding_fraction_for("cpu") < settings.padding_fraction_for("cuda")
    assert Settings(model_repository=Path(), max_batch_tokens=7).batch_tokens_for("cuda") == 7
    assert Settings(model_repository=Path(), max_padding_fraction=0).padding_fraction_for("cuda") == 0


def test_flag_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Settings] = []

    async def serve(settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("encserve_server.__main__.serve", serve)
    monkeypatch.setattr("encserve_server.__main__.leave", lambda status: None)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    environment = {
        "ENCSERVE_MODEL_REPOSITORY": str(tmp_path),
        "ENCSERVE_GRPC_PORT": "1234",
        "ENCSERVE_METRICS_PORT": "4321",
        "ENCSERVE_MODEL": "a b@2",
        "ENCSERVE_REFLECTION": "false",
    }
    result = CliRunner().invoke(main, ["--grpc-port", "999"], env=environment, catch_exceptions=False)
    assert result.exit_code == 0
    (settings,) = seen
    assert (settings.grpc_port, settings.metrics_port, settings.max_request_sequences) == (999, 4321, 256)
    assert (settings.model, settings.model_repository, settings.reflection) == (("a", "b@2"), tmp_path, False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing option '--model-repository'"),
        (["--model-repository", "m", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["--model-repository", "m", "--max-queue-tokens", "0"], "max_queue_tokens must be >= 1; was 0"),
        (["--model-repository", "m", "--max-queue-tokens", "many"], "'many' is not a valid integer"),
        (["--model-repository", "m", "--precision", "bfloat16"], "precision bfloat16 needs engine openvino"),
    ],
)
def test_a_bad_flag_stops_the_start(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_a_start_that_fails_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[int] = []
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr("encserve_server.__main__.leave", left.append)
    CliRunner().invoke(main, ["--model-repository", str(tmp_path / "nowhere")], catch_exceptions=False)
    assert left == [1]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said == f"cannot start: --model-repository {tmp_path}/nowhere: no such directory"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path = write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    return TextTokenizer(path, ThreadPoolExecutor(1), 2**20)


async def tokenize(tokenizer: TextTokenizer, texts: list[str], max_tokens: int) -> list[TokenizedText]:
    taken: list[TokenizedText | str] = []
    await tokenizer.tokenize(texts, max_tokens, taken.append)
    return [it for it in taken if not isinstance(it, str)]


@given(st.lists(st.text(max_size=60), min_size=1, max_size=4), st.integers(2, 12))
def test_a_cut_text_fits_and_keeps_its_special_tokens(
    tokenizer: TextTokenizer, texts: list[str], max_tokens: int
) -> None:
    cut, whole = asyncio.run(tokenize(tokenizer, texts, max_tokens)), asyncio.run(tokenize(tokenizer, texts, 10_000))
    for short, full in zip(cut, whole, strict=True):
        assert len(short.ids) == min(max_tokens, len(full.ids))
        assert short.original_token_count == full.original_token_count == len(full.ids)
        assert (short.ids[0], short.ids[-1]) == (1, 2)
        assert short.ids[:-1].tolist() == full.ids[: len(short.ids) - 1].tolist()
        assert short.char_starts == [*full.char_starts[: len(short.ids) - 1], 0]
        assert short.char_ends == [*full.char_ends[: len(short.ids) - 1], 0]
        assert short.special.tolist() == [True, *[False] * (len(short.ids) - 2), True]


async def test_whoever_else_runs_python_goes_on_while_a_long_text_is_tokenized(tokenizer: TextTokenizer) -> None:
    """A health check, for one. In CPU time, of which both threads get their shares on the busiest machine."""
    tokenizing_began = tokenizer._executor.submit(time.thread_time).result()
    began = time.thread_time()
    task = asyncio.create_task(tokenize(tokenizer, ["hello world " * 100_000], LONGEST))
    while not task.done():
        await asyncio.sleep(0)
    took = time.thread_time() - began
    assert (await task)[0].original_token_count == 200_002
    assert took > (tokenizer._executor.submit(time.thread_time).result() - tokenizing_began) / 8


async def test_a_few_words_do_not_wait_behind_a_long_text(tokenizer: TextTokenizer) -> None:
    release = threading.Event()
    tokenizer._executor.submit(release.wait)  # as a long text would keep the thread
    try:
        assert (await tokenize(tokenizer, ["hello world", "brave"], LONGEST))[0].ids.tolist() == [1, 4, 7, 2]
    finally:
        release.set()


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer.json: not a tokenizer"):
        TextTokenizer(tmp_path / "tokenizer.json", ThreadPoolExecutor(1), 2**20)


def outputs_of(rows: list[Rows], *wanted: Output) -> list[OutputArrays]:
    """What is made of a batch of these (seq, d_model) rows, with numbers for padding that must show nowhere."""
    lengths = [len(its) for its in rows]
    padded = np.full((len(rows), max(lengths), rows[0].shape[1]), np.nan, np.float32)
    for its, place in zip(rows, padded, strict=True):
        place[: len(its)] = its
    with np.errstate(all="ignore"):
        inputs = [np.zeros(length, np.int64) for length in lengths]
        spans = [np.array([[0, length], [length // 2, length], [0, 0]]) for length in lengths]
        return make_outputs(BatchResult(padded, lengths, 0.0, 0.0), inputs, [wanted] * len(rows), spans, MAKERS)


class Doubling:
    """A head of the width that comes in."""

    def run(self, *inputs: Numbers) -> Numbers:
        return inputs[0] * 2


IDS: list[TokenIds] = []  # plain pooling looks at none
# Every pooling, joined.
MADE = (OutputKind.MODEL, OutputKind.MULTI_VECTOR, OutputKind.SPARSE)
KINDS = tuple(kind for kind in OutputKind if kind not in (OutputKind.TOKENS, OutputKind.SPANS, *MADE))
MAKERS = {OutputKind.MODEL: ModelVector(ModelPooling(KINDS, l2_normalize=False, width=3 * len(KINDS)), Doubling())}
EVERY_OUTPUT = [
    Output(kind, l2_normalize, data_type, dimensions, skipped)
    for kind in (OutputKind.TOKENS, *KINDS, OutputKind.MODEL)
    for l2_normalize in (False, True)
    for data_type in DataType
    for dimensions, skipped in ((0, 0), (2, 0), *([(0, 4)] if kind is OutputKind.MODEL else []))
] + [Output(OutputKind.SPANS, False, span_pooling=pooling) for pooling in POOLINGS]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.permutations(EVERY_OUTPUT), st.integers(0, 2**32))
def test_a_sequence_gets_the_same_alone_and_beside_others_to_the_last_bit(
    lengths: list[int], wanted: list[Output], seed: int
) -> None:
    """Of every output, and though one of the others is not finite."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((length, 3)).astype(np.float32) for length in lengths]
    rows[-1][0, 0], rows[0][-1] = np.inf, -0.0
    for its, together in zip(rows, outputs_of(rows, *wanted), strict=True):
        (alone,) = outputs_of([its], *wanted)
        assert [array.tobytes() for array in together] == [array.tobytes() for array in alone]
        assert [array.dtype for array in together] == [output.data_type.dtype for output in wanted]


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_binary_says_which_numbers_are_more_than_0(length: int, width: int, kind: OutputKind, seed: int) -> None:
    rows = [np.random.default_rng(seed).integers(-1, 2, (length, width)).astype(np.float32)]
    its, bits = outputs_of(rows, Output(kind, False), Output(kind, False, DataType.BINARY))[0]
    np.testing.assert_array_equal(bits, np.packbits(its > 0, axis=1))
    assert bits.nbytes == DataType.BINARY.row_bytes(width)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 2**32))
def test_outputs_are_those_of_the_rows(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((length, 3)).astype(np.float32) for length in lengths]
    wanted = [Output(kind, False) for kind in (OutputKind.TOKENS, OutputKind.MEAN, OutputKind.CLS, OutputKind.MAX)]
    for its, (tokens, mean, cls, largest) in zip(rows, outputs_of(rows, *wanted), strict=True):
        np.testing.assert_array_equal(tokens, its)
        np.testing.assert_allclose(mean, its.mean(axis=0, keepdims=True), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(cls, its[:1])
        np.testing.assert_array_equal(largest, its.max(axis=0, keepdims=True))
        (joined,) = outputs_of([its], Output(OutputKind.MODEL, False))[0]
        apart = outputs_of([its], *(Output(kind, False) for kind in KINDS))[0]
        np.testing.assert_array_equal(joined, 2 * np.concatenate(apart, axis=1))
        weights = np.arange(1, len(its) + 1)
        others = (np.average(its, axis=0, weights=weights), its.sum(axis=0) / np.sqrt(len(its)), its[-1])
        for kind, want in zip(("WEIGHTED_MEAN", "MEAN_SQRT_LENGTH", "LAST_TOKEN"), others, strict=True):
            np.testing.assert_allclose(apart[KINDS.index(OutputKind[kind])][0], want, rtol=1e-4, atol=1e-6)
    for unit in outputs_of(rows, Output(OutputKind.TOKENS, True), Output(OutputKind.MEAN, True)):
        for array in unit:
            np.testing.assert_allclose(np.linalg.norm(array, axis=1), 1, rtol=1e-5)


def test_sequences_of_a_batch_may_want_different_things() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    wanted = [(Output(OutputKind.MAX, False),), (Output(OutputKind.CLS, False), Output(OutputKind.MEAN, False)), ()]
    made = make_outputs(BatchResult(np.concatenate([rows, rows[:1]]), [2, 2, 2], 0.0, 0.0), IDS, wanted, [])
    assert [[array.tolist() for array in its] for its in made] == [[[[3, 4, 5]]], [[[6, 7, 8]], [[7.5, 8.5, 9.5]]], []]


def test_rows_that_are_wanted_as_they_are_are_not_copied() -> None:
    batch = BatchResult(np.ones((2, 5, 3), np.float32), [5, 2], 0.0, 0.0)
    for (rows,) in make_outputs(batch, IDS, [(Output(OutputKind.TOKENS, False),)] * 2, []):
        assert np.shares_memory(rows, batch.output)


@given(st.integers(0, 2**63))
def test_a_number_is_written_as_protobuf_writes_it(number: int) -> None:
    written = pb.SequenceInfo(token_count=number % 2**32).SerializeToString()
    assert written == (b"" if not number % 2**32 else b"\x08" + wire.varint(number % 2**32))


@given(st.lists(st.binary(max_size=300), max_size=5), st.text(max_size=20))
def test_a_message_from_parts_is_the_message(data: list[bytes], request_id: str) -> None:
    """As long or as short as they are, and with a field of bytes in a message in a message in a message."""
    numbers = pb.EncodeStreamResponse.RESPONSE_FIELD_NUMBER, pb.EncodeResponse.OUTPUTS_FIELD_NUMBER
    views = [memoryview(part) for part in data]
    tensor = [pb.RaggedTensor(width=3).SerializeToString(), *wire.field(pb.RaggedTensor.DATA_FIELD_NUMBER, views)]
    response = [pb.EncodeResponse(model="m").SerializeToString(), *wire.field(numbers[1], tensor)]
    whole = [pb.EncodeStreamResponse(request_id=request_id).SerializeToString(), *wire.field(numbers[0], response)]
    wanted = pb.EncodeStreamResponse(
        request_id=request_id,
        response=pb.EncodeResponse(model="m", outputs=[pb.RaggedTensor(width=3, data=b"".join(data))]),
    )
    assert pb.EncodeStreamResponse.FromString(b"".join(whole)) == wanted


def test_a_row_of_zeros_stays_when_normalised() -> None:
    ((rows,),) = outputs_of([np.zeros((2, 3), np.float32)], Output(OutputKind.TOKENS, True))
    assert rows.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("quota", "wanted"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("", 64)])
def test_a_containers_quota_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, wanted: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpus, "_CGROUP_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert cpus.usable_cpus() == wanted


@pytest.mark.parametrize(
    ("cpuinfo", "exact"),
    [
        ("model name\t: A\nflags\t\t: fpu avx2 avx512_vnni\n", True),
        ("flags\t\t: fpu avx2 avx_vnni\n", True),
        ("flags\t\t: fpu avx2\n", False),
        ("Features\t: fp asimd asimddp\n", True),
        (None, True),
    ],
)
def test_which_cpus_multiply_bytes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, exact: bool
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(cpus, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpus.multiplies_bytes_exactly() == exact
    assert ("no VNNI" in loading.precision_advice("int8", "cpu")) == (not exact)


@pytest.mark.parametrize(
    ("precision", "device", "word"),
    [("float32", "cpu", ""), ("float32", "cuda", ""), ("float16", "cuda", ""), ("float16", "cpu", "for GPUs"),
     ("int8", "cuda", "for CPUs")],
)  # fmt: skip
def test_a_precision_that_does_not_suit_the_device(precision: str, device: str, word: str) -> None:
    advice = loading.precision_advice(precision, device)
    assert word in advice if word else not advice


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_log_lines_carry_their_fields(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure("info", log_format)
        logging.getLogger("encserve_server.test").info("served", extra={"model": "tiny"})
        logging.getLogger("encserve_server.test").debug("too fine")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    if log_format == "json":
        fields = json.loads(line)
        assert (fields["level"], fields["message"], fields["model"]) == ("INFO", "served", "tiny")
    else:
        assert line.endswith("served  model=tiny")
