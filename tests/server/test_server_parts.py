"""Tests of small modules of the server: errors, settings, flags, the tokenizer, messages, CPUs and logs."""

import asyncio
import gc
import json
import logging
import os
import re
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from fake_server import LONGEST, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from waiting import collector_off, until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server import errors
from encserve_server.__main__ import main
from encserve_server.errors import (
    CALLER_ERRORS,
    PLAIN,
    BundleError,
    EncserveError,
    FieldPath,
    InvalidField,
    QueueFull,
    RequestField,
    SequenceTooLong,
)
from encserve_server.failures import Failure, to_failure
from encserve_server.models import tokenizing
from encserve_server.models.inputs import InputChecker, LengthLimit, SentIds
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.turns import FairThreadPool
from encserve_server.protocols import wire
from encserve_server.repository import loading
from encserve_server.settings import MIB, Settings
from encserve_server.telemetry import logs
from encserve_server.transport.grpc import status
from encserve_server.types.bundles import TextTemplate
from encserve_server.types.callers import ANY_SENDER
from encserve_server.types.requests import Task
from encserve_server.types.sequences import TokenSequence


def subclasses(base: type[EncserveError]) -> set[type[EncserveError]]:
    return {base, *(found for sub in base.__subclasses__() for found in subclasses(sub))}


# Errors


def test_every_error_of_a_caller_has_a_status() -> None:
    """Each error class has a different reason, except EmptyInputs and UnknownField, which share INVALID_FIELD.

    EmptyInputs and UnknownField are separate classes, because text-embeddings-inference has an error type for each.
    """
    never_sent = {EncserveError, errors.RequestError, errors.LimitReached, *subclasses(errors.StartupError)}
    assert set(CALLER_ERRORS) == subclasses(EncserveError) - never_sent
    assert to_failure(BundleError("/srv/models/a: altered"), PLAIN) is None
    reasons = [error.reason for error in CALLER_ERRORS if error not in (errors.EmptyInputs, errors.UnknownField)]
    assert len(set(reasons)) == len(reasons)
    assert EncserveError.reason not in reasons
    assert {errors.EmptyInputs.reason, errors.UnknownField.reason} == {InvalidField.reason}
    labels = {status.code_label(code) for code in grpc.StatusCode}
    assert {"OK", "Canceled", "InvalidArgument", "ResourceExhausted", "DeadlineExceeded"} <= labels


def failure(error: EncserveError) -> Failure:
    found = to_failure(error, PLAIN)
    assert found is not None
    return found


def test_an_error_fits_into_the_trailers_and_may_have_a_retry_delay() -> None:
    refused = failure(InvalidField("inputs", "x" * 100_000))
    assert sum(len(key) + len(value) for key, value in status.trailers_of(refused)) + len(refused.text) < 8192
    assert refused.retry_delay_s is None
    full = failure(QueueFull("tokens", 1, 2, 3, 0.25))
    assert status.trailers_of(full)[-1] == ("grpc-retry-pushback-ms", "250")


def test_an_error_of_a_part_has_the_input_index_of_the_whole_call() -> None:
    error = InvalidField(
        FieldPath(RequestField.TEXT, 3),
        "{output} of {others}, at {task}",
        output=FieldPath(RequestField.OUTPUT_DIMENSIONS, 1),
        others=(FieldPath(RequestField.INPUT, 0), FieldPath(RequestField.IDS, 4, 2)),
        task=Task.QUERY,
    )
    error.move(100)
    assert error.text(PLAIN) == "text 103: output_dimensions 1 of input 100, ids 104, place 2, at query"


# Settings and flags


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"grpc_port": 70000}, "grpc_port must be <= 65535; was 70000"),
        ({"max_queue_tokens": 0}, "max_queue_tokens must be >= 1; was 0"),
        ({"max_padding_fraction": 2.0}, "max_padding_fraction must be <= 1; was 2.0"),
        ({"stall_seconds": float("nan")}, "stall_seconds .* nan"),
        ({"grace_seconds": float("inf")}, "grace_seconds .* inf"),
        ({"host": ""}, "host must not be empty"),
        ({"cache_dir": Path()}, "cache_dir"),
        ({"grpc_port": 9464}, "grpc_port and metrics_port .* 9464"),
        ({"precision": "bfloat16"}, "precision bfloat16 needs engine openvino"),
        ({"engine": "openvino", "device": "cuda"}, "device cuda needs engine onnxruntime"),
        ({"max_in_flight_mib": 67}, r"max_in_flight_mib must be >= 68, .* was 67"),
        ({"max_in_flight_mib": 71, "http_port": 0}, "max_in_flight_mib must be >= 72, .* was 71"),
        ({"served_model_name": ("a",)}, "served_model_name must be ALIAS=NAME, .*; was 'a'"),
        ({"served_model_name": ("a@1=b",)}, "was 'a@1=b'"),
        ({"served_model_name": ("a=b", "a=c")}, "was 'a=c'"),
        ({"cors_allow_origin": ("example.org",)}, "cors_allow_origin must be SCHEME://HOST, .*; was 'example.org'"),
        ({"cors_allow_origin": ("https://example.org/",)}, "was 'https://example.org/'"),
        ({"tls_cert_file": "a"}, "^tls_cert_file and tls_key_file go together; were a and None$"),
        ({"tls_key_file": "a"}, "^tls_cert_file and tls_key_file go together; were None and a$"),
        ({"tls_client_ca_file": "a"}, "^tls_client_ca_file needs tls_cert_file and tls_key_file$"),
        *(
            ({"trace_endpoint": it}, "trace_endpoint must be http://HOST:PORT")
            for it in ("localhost:4317", "ftp://host", "http://", "http://host:4317/v1/traces")
        ),
    ],
)
def test_a_bad_setting_is_named_with_its_value(value: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Settings(model_repository=Path(), **value)  # type: ignore[arg-type]


def test_defaults_depend_on_the_device() -> None:
    settings = Settings(model_repository=Path())
    assert (settings.batch_tokens_for("cpu"), settings.batch_tokens_for("cuda")) == (512, 16384)
    assert settings.padding_fraction_for("cpu") < settings.padding_fraction_for("cuda")
    own = Settings(model_repository=Path(), max_batch_tokens=7, max_padding_fraction=0)
    assert (own.batch_tokens_for("cuda"), own.padding_fraction_for("cuda")) == (7, 0)


@pytest.mark.parametrize(
    ("usable_mib", "own", "wanted_mib"),
    [
        (2048, {}, 512),
        (65536, {}, 1024),
        (100, {}, 68),  # a request and a reply of the largest size must fit
        (65536, {"max_response_mib": 1024}, 1028),
        (100, {"max_in_flight_mib": 2000}, 2000),
    ],
)
def test_the_byte_budget_depends_on_the_memory(usable_mib: int, own: dict[str, Any], wanted_mib: int) -> None:
    settings = Settings(model_repository=Path(), **own)
    assert settings.in_flight_bytes_for(usable_mib * MIB) == wanted_mib * MIB


def test_a_failed_start_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(logs, "configure", lambda *_: SimpleNamespace())
    monkeypatch.setattr("encserve_server.__main__.exit_process", statuses.append)
    CliRunner().invoke(main, ["--model-repository", str(tmp_path / "nowhere")], catch_exceptions=False)
    assert statuses == [1]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line == f"cannot start: --model-repository {tmp_path}/nowhere: no such directory"


# Tokenizing

CUT = LengthLimit(LONGEST, "", truncate=True)


@pytest.fixture(scope="module")
def pool() -> FairThreadPool:
    return FairThreadPool(1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, pool: FairThreadPool) -> TextTokenizer:
    return TextTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"), pool, 2**20)


def checker_of(tokenizer: TextTokenizer, **limits: int) -> InputChecker:
    """Return the checker of a model that takes texts and ids."""
    graph = SimpleNamespace(takes_vectors=False)
    bundle: Any = SimpleNamespace(name="m", graph=graph, special_token_ids=(), vocab_size=100)
    return InputChecker(bundle, tokenizer, **{"max_text_bytes": 2**20, **limits})


@pytest.fixture(scope="module")
def template_checker(tmp_path_factory: pytest.TempPathFactory, pool: FairThreadPool) -> InputChecker:
    """Return a checker whose tokenizer adds no special tokens, and whose template adds words."""
    path = write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.save(str(path))
    template = TextTemplate("new ", "hello ", "brave ", " world world", 2)
    return checker_of(TextTokenizer(path, pool, 2**20, template=template))


def tokenize(tokenizer: TextTokenizer, texts: list[str], max_tokens: int) -> list[TokenSequence]:
    return [it for it in tokenizer.tokenize(texts, max_tokens, details=True) if not isinstance(it, str)]


@given(st.lists(st.text(max_size=60), min_size=1, max_size=4), st.integers(2, 12))
def test_a_truncated_text_fits_and_keeps_its_special_tokens(
    tokenizer: TextTokenizer, texts: list[str], max_tokens: int
) -> None:
    cut, whole = tokenize(tokenizer, texts, max_tokens), tokenize(tokenizer, texts, 10_000)
    for short, full in zip(cut, whole, strict=True):
        ids, whole_ids = short.input.tolist(), full.input.tolist()
        assert len(ids) == min(max_tokens, len(whole_ids))
        assert short.original_token_count == full.original_token_count == len(whole_ids)
        assert (ids[0], ids[-1]) == (1, 2)
        assert ids[:-1] == whole_ids[: len(ids) - 1]
        assert full.char_starts is not None
        assert full.char_ends is not None
        assert short.special is not None
        assert short.char_starts == [*full.char_starts[: len(ids) - 1], 0]
        assert short.char_ends == [*full.char_ends[: len(ids) - 1], 0]
        assert short.special.tolist() == [True, *[False] * (len(ids) - 2), True]


@given(st.lists(st.sampled_from(["hello", "brave", "new", "[SEP]"]), max_size=8), st.sampled_from(["", "new world "]))
def test_a_template_adds_words_around_a_text(template_checker: InputChecker, words: list[str], prompt: str) -> None:
    """The tokens of a template are special tokens without offsets. Truncation keeps the words after the text."""
    limit, text = LengthLimit(7, "", truncate=True), " ".join(words)
    rules = template_checker.rules(limit, details=True, prompt=prompt)
    (sequence,) = asyncio.run(template_checker.check([text], rules))
    before = [4, 6, 7, 5] if prompt else [6]
    ids = [4 + ["hello", "brave", "new"].index(it) if it != "[SEP]" else 2 for it in words]
    whole = [*before, *ids, 7, 7]
    kept = whole if len(whole) <= 7 else [*whole[:5], 7, 7]
    assert sequence.input.tolist() == kept
    assert sequence.original_token_count == len(whole)
    assert sequence.special is not None
    n_text = max(len(kept) - len(before) - 2, 0)
    assert sequence.special.tolist() == [True] * len(before) + [False] * n_text + [True] * 2
    starts = [sum(len(it) + 1 for it in words[:i]) for i in range(n_text)]
    assert sequence.char_starts == [0] * len(before) + starts + [0] * 2
    assert sequence.char_ends is not None
    assert [text[a:b] for a, b in zip(sequence.char_starts, sequence.char_ends, strict=True)] == [
        *[""] * len(before),
        *words[:n_text],
        *[""] * 2,
    ]


def test_special_tokens_in_a_text_are_split_if_the_bundle_says_so(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.save(str(path))
    found = [
        TextTokenizer(path, FairThreadPool(1), 2**20, split_special_tokens=split).tokenize(["[SEP]"], 99, details=False)
        for split in (False, True)
    ]
    assert [it.input.tolist() for (it,) in found if isinstance(it, TokenSequence)] == [[1, 2, 2], [1, 3, 3, 3, 2]]


@pytest.mark.parametrize("around", ["[CLS] $A [SEP]", "$A [SEP]", "[CLS] $A", "$A", None])
@pytest.mark.parametrize("unknown", ["[UNK]", "none"])
def test_the_special_tokens_around_a_text_are_known(tmp_path: Path, around: str | None, unknown: str) -> None:
    """The special tokens around a text are found, even if the tokenizer has no token for unknown words."""
    path = write_tokenizer(tmp_path / "tokenizer.json", unknown)
    changed = Tokenizer.from_file(str(path))
    special = [("[CLS]", 1), ("[SEP]", 2)]
    if around:
        changed.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    else:
        changed.post_processor = processors.Sequence([])
    changed.save(str(path))
    before, behind = TextTokenizer(path, FairThreadPool(1), 2**20).special_around
    assert before == ((1,) if "[CLS]" in (around or "") else ())
    assert behind == ((2,) if "[SEP]" in (around or "") else ())


async def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: TextTokenizer, pool: FairThreadPool) -> None:
    """The test compares CPU times, because wall times depend on the load of the machine."""
    before = await pool.run(ANY_SENDER, 0, time.thread_time)
    began = time.thread_time()
    checker = checker_of(tokenizer)
    task = asyncio.create_task(checker.check(["hello world " * 50_000], checker.rules(CUT)))
    while not task.done():
        await asyncio.sleep(0)
    took = time.thread_time() - began
    (sequence,) = await task
    assert sequence.original_token_count == 100_002
    assert took > (await pool.run(ANY_SENDER, 0, time.thread_time) - before) / 8


async def test_a_short_text_does_not_wait_for_a_long_text(tokenizer: TextTokenizer, pool: FairThreadPool) -> None:
    release = threading.Event()
    busy = asyncio.create_task(pool.run(ANY_SENDER, 0, release.wait))  # blocks the thread, like a long text
    try:
        checker = checker_of(tokenizer)
        found = await checker.check(["hello world", "brave"], checker.rules(CUT))
        assert [it.input.tolist() for it in found] == [[1, 4, 7, 2], [1, 5, 2]]
    finally:
        release.set()
        await busy


async def test_the_first_of_several_bad_inputs_is_refused(tokenizer: TextTokenizer) -> None:
    """A thread tokenizes inputs of at most 8 KiB at a time. Each text is longer, so it is tokenized alone."""
    checker = checker_of(tokenizer)
    rules = checker.rules(LengthLimit(2000, "max_sequence_tokens of m"))
    fits, too_long = "hello world " * 900, "hello world " * 1100
    bad_ids = SentIds(np.array([100]), 1)
    with pytest.raises(SequenceTooLong, match=r"^text 2: must be at most 2000 tokens .*; was 2202"):
        await checker.check([fits, fits, too_long, too_long, bad_ids], rules)
    with pytest.raises(InvalidField, match=r"^ids 1, place 0: must be from 0 to 99 .*; was 100"):
        await checker.check([fits, bad_ids, too_long], rules)
    found = await checker.check([fits, SentIds(np.array([5]), 1), fits], rules)
    assert [len(it.input) for it in found] == [1802, 1, 1802]


@pytest.mark.parametrize("text", ["hello " * 20, "hello " * 50], ids=["at once", "in a thread"])
async def test_a_refused_text_leaves_nothing_in_memory(tokenizer: TextTokenizer, text: str) -> None:
    """An error in a reference cycle would keep the inputs in memory until the cycle collector runs."""
    checker = checker_of(tokenizer)
    with collector_off():
        with pytest.raises(SequenceTooLong) as caught:
            await checker.check([text, text], checker.rules(LengthLimit(3, "")))
        del caught
        await until(lambda: not any(issubclass(type(it), SequenceTooLong) for it in gc.get_objects()))


@pytest.fixture
def panicking_file(tmp_path: Path) -> Path:
    """Write the file of a tokenizer whose regular expression takes exponential time for some texts.

    For such a text, the regular expression engine stops with an error, and the Rust code panics.
    """
    path = write_tokenizer(tmp_path / "panicking.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$| "), "removed")
    tokenizer.save(str(path))
    return path


PANICS = "a" * 30 + "b"


def test_a_text_that_makes_the_tokenizer_panic_fails_alone(panicking_file: Path) -> None:
    """For a panic in Rust code, PyO3 raises a BaseException that is not an Exception.

    KeyboardInterrupt is not an Exception either.
    """
    tokenizer = TextTokenizer(panicking_file, FairThreadPool(1), 2**20)
    before, panicked, after = tokenizer.tokenize(["hello", PANICS, "world"], LONGEST, details=False)
    assert isinstance(before, TokenSequence)
    assert isinstance(panicked, str)
    assert "retry-limit-in-match" in panicked
    assert isinstance(after, TokenSequence)
    assert after.input.tolist() == [1, 7, 2]
    with pytest.raises(BundleError, match="fails for the prompt 'aaa.*retry-limit-in-match"):
        tokenizer.count_prompt(PANICS)


def test_an_interrupt_is_not_an_error_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Interrupted:
        """A tokenizer that raises KeyboardInterrupt, as if the user had pressed Control-C."""

        encode_batch_fast = interrupt

        def __init__(self, real: Tokenizer) -> None:
            self.real = real

        @classmethod
        def from_file(cls, path: str) -> "Interrupted":
            return cls(Tokenizer.from_file(path))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(tokenizing, "Tokenizer", Interrupted)
    tokenizer = TextTokenizer(write_tokenizer(tmp_path / "tokenizer.json"), FairThreadPool(1), 2**20)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.tokenize(["hello"], LONGEST, details=False)


@pytest.mark.parametrize(
    ("part", "content", "problem"),
    [
        ("", {}, ""),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, "precompiled_charsmap"),
        (
            "post_processor",  # the file loads, but the first use panics
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
            "no entry found for key",
        ),
    ],
)
def test_a_file_that_the_library_cannot_load_is_refused(
    tmp_path: Path, part: str, content: dict[str, Any], problem: str
) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: content} if part else {}))
    with pytest.raises(BundleError, match=rf"tokenizer.json: not a tokenizer: .*{problem}"):
        TextTokenizer(path, FairThreadPool(1), 2**20)


# Messages, CPUs, advice and logs


@given(st.integers(0, 2**32 - 1))
def test_a_varint_is_that_of_protobuf(number: int) -> None:
    """The length of a large reply is a varint of up to five bytes."""
    written = pb.SequenceInfo(token_count=number).SerializeToString()
    assert written == (b"\x08" + wire.varint(number) if number else b"")


@given(st.lists(st.binary(max_size=300), max_size=5), st.text(max_size=20))
def test_a_message_joined_from_parts_is_the_message(data: list[bytes], request_id: str) -> None:
    """The parts are the value of the field `response.outputs[0].data` of an EncodeStreamResponse."""
    numbers = pb.EncodeStreamResponse.RESPONSE_FIELD_NUMBER, pb.EncodeResponse.OUTPUTS_FIELD_NUMBER
    views = [memoryview(part) for part in data]
    tensor = [pb.RaggedTensor(width=3).SerializeToString(), *wire.field(pb.RaggedTensor.DATA_FIELD_NUMBER, views)]
    response = [pb.EncodeResponse(model="m").SerializeToString(), *wire.field(numbers[1], tensor)]
    whole = [pb.EncodeStreamResponse(request_id=request_id).SerializeToString(), *wire.field(numbers[0], response)]
    wanted = pb.EncodeStreamResponse(
        request_id=request_id,
        response=pb.EncodeResponse(model="m", outputs=[pb.RaggedTensor(width=3, data=b"".join(data))]),
    )
    assert pb.EncodeStreamResponse.FromString(wire.join(whole)) == wanted


@pytest.mark.parametrize("size", [0, 1, 2**18 - 3, 2**18, 3 * 2**20])
def test_parts_of_any_size_are_joined_in_order(size: int) -> None:
    parts: list[wire.Buffer] = [b"a", memoryview(os.urandom(size)), b"", memoryview(b"bc")]
    assert wire.join(parts) == b"".join(parts)


@pytest.mark.parametrize(
    ("precision", "device", "word"),
    [("float32", "cpu", ""), ("float32", "cuda", ""), ("float16", "cuda", ""), ("float16", "cpu", "for GPUs"),
     ("int8", "cuda", "for CPUs")],
)  # fmt: skip
def test_a_precision_for_another_device_gets_advice(precision: str, device: str, word: str) -> None:
    advice = loading.precision_advice(precision, device)
    assert word in advice if word else not advice


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_log_lines_have_their_fields(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        written = logs.configure("info", log_format)
        logging.getLogger("encserve_server.test").info("served", extra={"model": "tiny", "field": "a\nERROR b"})
        logging.getLogger("encserve_server.test").debug("hidden")
        written.close()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    (written_at,) = re.findall(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line)
    assert abs(datetime.fromisoformat(written_at).timestamp() - time.time()) < 60
    if log_format == "json":
        fields = json.loads(line)
        assert (fields["level"], fields["message"], fields["model"]) == ("INFO", "served", "tiny")
        assert fields["field"] == "a\nERROR b"
    else:
        assert line.endswith(r"served  model=tiny field='a\nERROR b'")
