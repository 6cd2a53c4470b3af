"""Tests of `Embedder`, which computes vectors in this process.

The vectors are in the order of the inputs, and equal a server's vectors. Each refused input has a reason.
"""

import gc
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads
from fake_engine import FakeEngine, fake_rows
from fake_server import D_MODEL, LONGEST, StartServer, fake_model, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundle import VOCAB_SIZE, write_bundle
from tiny_heads import END, every_kind, loader, multi_vector, npy, sparse, text, words
from waiting import collector_off

from encserve_client.options import Options, Output
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_server.errors import BundleError, EngineUnhealthy, InferenceFailed, InvalidField, RequestError
from encserve_server.offline import Embedder, Stopped
from encserve_server.offline.embedder import batches
from encserve_server.repository import tuning
from encserve_server.repository.loaded import LoadedModel
from encserve_server.scheduling.batching import BatchPolicy

TEXTS = [text(5, 6, 7), text(8), text(*range(10, 40)), text(9, 9)]
IDS = [[5, 6, 7], [1, 8, 2], [4] * 30]
MASK, DOT = 3, 9
LATE = {"files": {"multi_vector.onnx": tiny_heads.multi_vector_file()}, "multi_vector": multi_vector()}
STATIC = {
    "files": {
        "sparse.onnx": tiny_heads.sparse_file("max"),
        "query.json": words(special=False).to_str().encode(),
        "query.npy": npy(np.linspace(-1, 1, VOCAB_SIZE, dtype=np.float32)),
    },
    "sparse": sparse(),
    "query": manifest_pb2.TaskSettings(
        static_sparse=manifest_pb2.StaticSparse(tokenizer_file="query.json", weights_file="query.npy", max_tokens=6)
    ),
}
# Each case changes a bundle and makes several calls. A call has inputs and options.
CASES: dict[str, tuple[dict[str, Any], list[tuple[list[Any], dict[str, Any]]]]] = {
    "plain": (
        {},
        [
            (TEXTS, {}),
            (IDS, {}),
            ([*TEXTS, *IDS, text(3)], {}),
            *[
                (TEXTS, {"output": kind})
                for kind in ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length", "tokens")
            ],
            (IDS, {"output": "tokens", "dtype": "float16"}),
            (TEXTS, {"output": "tokens", "exclude_special_tokens": True}),
            (TEXTS, {"output": "mean", "dimensions": 3, "l2_normalize": True, "dtype": "float16"}),
            (TEXTS, {"dtype": "int8"}),
            (TEXTS, {"dtype": "binary", "dimensions": 5}),
            ([text(*[5] * 100), text(6)], {"truncate": True, "output": "mean"}),
            ([[5] * 100], {"truncate": True, "output": "tokens"}),
        ],
    ),
    "a template": (
        {
            "tokenizer": words(special=False),
            "text__template": manifest_pb2.TextTemplate(
                before="w3 ", before_prompt="w4 ", after_prompt=" ", after=" w2", after_tokens=1
            ),
        },
        [(TEXTS, {"output": "tokens", "exclude_special_tokens": True})],
    ),
    "special ids": (
        {"text": manifest_pb2.TextInput(tokenizer_file="tokenizer.json", special_token_ids=[1, 2])},
        [(IDS, {"output": "tokens", "exclude_special_tokens": True})],
    ),
    "prompts that pooling skips": (
        {
            "prompts": {"q": "w7 "},
            "default_prompt_name": "q",
            "pooling_skips_prompt": True,
            "pooling": manifest_pb2.POOLING_MEAN,
        },
        [(TEXTS, {}), (TEXTS, {"prompt_name": "q"}), (TEXTS, {"prompt_name": ""})],
    ),
    "texts without tokens": (
        {"tokenizer": words(special=False), "text__takes_empty": True},
        [(["", text(5), ""], {}), (["", text(5), ""], {"output": "tokens"})],
    ),
    "MaxSim": (
        {
            **LATE,
            "prompts": {"q": "w7 "},
            "query": manifest_pb2.TaskSettings(
                prompt_name="q",
                max_tokens=8,
                expansion=manifest_pb2.Expansion(min_tokens=8, token_id=MASK, attended=False),
            ),
            "document": manifest_pb2.TaskSettings(max_tokens=40, skipped_token_ids=[DOT, END]),
        },
        [
            ([text(5), text(5, 6, 8)], {"task": "query", "output": "multi_vector"}),
            ([text(5, DOT), text(6)], {"task": "document", "output": "multi_vector"}),
            (TEXTS, {"output": "multi_vector", "pool_factor": 2.0}),
        ],
    ),
    "weights of tokens": (every_kind(), [(TEXTS, {"output": "sparse"})]),
    "static weights": (
        STATIC,
        [
            (TEXTS, {"output": "sparse", "max_active_dims": 4, "dtype": "float16"}),
            ([text(5, 40, 5, 6), "", text(9, 8, 7, 10)], {"output": "sparse", "task": "query"}),
        ],
    ),
}
SPEC = ("l2_normalize", "dimensions", "max_active_dims", "pool_factor")


@pytest.mark.parametrize("name", CASES)
async def test_rows_have_the_same_bits_as_those_of_a_server(
    start_server: StartServer, tmp_path: Path, name: str
) -> None:
    parts, calls = CASES[name]
    bundle = write_bundle(tmp_path / "bundles", **{"tokenizer": words(), **parts})
    server = await start_server(load=loader(bundle), model=("tiny@1",), tune_batches=False)
    with Embedder(bundle, tune_batches=False, max_batch_tokens=64) as embedder:
        made = [embedder.run(inputs, **asked) for inputs, asked in calls]
    for found, (inputs, asked) in zip(made, calls, strict=True):
        spec = Output(asked.get("output", "model"), **{key: asked[key] for key in SPEC if key in asked})
        options = Options((spec,), **{key: value for key, value in asked.items() if key not in (*SPEC, "output")})
        reply = await server.encode(*inputs, options=options.to_proto())
        (tensor,) = reply.outputs
        assert found.refused == {}
        assert found.rows.tobytes() == tensor.data, asked
        assert found.rows.flags.c_contiguous
        assert found.lengths.tolist() == list(tensor.lengths)
        assert (b"" if found.indices is None else found.indices.tobytes()) == tensor.indices
        assert found.l2_normalized == tensor.l2_normalized
        assert found.token_counts.tolist() == [it.token_count for it in reply.sequences]
        assert found.original_token_counts.tolist() == [it.original_token_count for it in reply.sequences]


# Loading


@pytest.mark.system  # measures for two seconds
def test_a_job_takes_the_largest_of_nearly_equal_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If several batch budgets are nearly equally fast, a job takes the largest budget.

    A server takes the smallest budget. A job has no waiting callers, and each batch has a fixed cost. So large batches
    are better for a job.
    """
    monkeypatch.setattr(tuning, "_MAX_SPREAD", math.inf)  # store the measurements, even if they vary widely
    bundle = write_bundle(tmp_path / "bundles")
    remembered = bundle.parent / f".{bundle.name}.tuned.json"
    Embedder(bundle, tune_batches=True).close()
    content = json.loads(remembered.read_text())
    content["tokens_per_second"] = {"256": 90.0, "384": 98.5, "512": 100.0, "768": 99.0, "1024": 97.0}
    remembered.write_text(json.dumps(content))
    with Embedder(bundle, tune_batches=True) as embedder:
        assert embedder.policy.max_batch_tokens == 768


def test_the_newest_version_is_loaded(tmp_path: Path) -> None:
    for version in ("1.9", "1.10", "1.10-rc1"):
        write_bundle(tmp_path, version=version)
    with Embedder(tmp_path / "tiny", tune_batches=False) as newest:
        assert newest.bundle.version == "1.10"
    with Embedder(str(tmp_path / "tiny/1.9"), tune_batches=False, intra_op_threads=2, parallel_batches=1) as pinned:
        assert pinned.bundle.version == "1.9"
        assert (pinned.intra_op_threads, pinned.parallel_batches, pinned.info.device) == (2, 1, "cpu")
    with pytest.raises(BundleError, match="nowhere: "):
        Embedder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="max_batch_tokens .* was 0"):
        Embedder(tmp_path / "tiny", max_batch_tokens=0)
    with (tmp_path / "tiny/1.9/model.onnx").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match="model.onnx: its sha256"):
        Embedder(tmp_path / "tiny/1.9")


@pytest.mark.parametrize(
    ("parts", "kind"), [({}, "model"), (LATE, "multi_vector"), ({k: STATIC[k] for k in ("files", "sparse")}, "sparse")]
)
def test_the_default_output_is_the_trained_one(tmp_path: Path, parts: dict[str, Any], kind: str) -> None:
    pooling: dict[str, Any] = {} if kind == "model" else {"pooling": manifest_pb2.POOLING_UNSPECIFIED}
    with Embedder(write_bundle(tmp_path, **parts, **pooling), tune_batches=False) as embedder:
        assert embedder.trained_kind == embedder.run(IDS).kind == kind


@pytest.mark.system  # starts a process
def test_no_library_of_a_server_is_imported() -> None:
    program = """
import sys
import encserve_server.offline
print(sorted({it.partition(".")[0] for it in sys.modules} & {"grpc", "aiohttp", "prometheus_client", "uvloop"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Running with a fake engine


@pytest.fixture
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that makes an embedder with a fake engine.

    The function takes the engine, and keyword arguments for `fake_model`.
    """
    opened: list[tuple[Embedder, FakeEngine]] = []
    folder = tmp_path / "tiny" / "1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()

    def make(engine: FakeEngine | None = None, **parts: Any) -> tuple[Embedder, FakeEngine]:
        chosen = engine or FakeEngine(D_MODEL)
        if not parts.get("takes_vectors"):
            parts["tokenizer_file"] = write_tokenizer(tmp_path / "tokenizer.json")

        def load(directory: Path, *_: Any) -> LoadedModel:
            return fake_model(directory, None, chosen, **parts)  # type: ignore[arg-type]

        monkeypatch.setattr("encserve_server.offline.embedder.load_model", load)
        opened.append((Embedder(folder, max_batch_tokens=64, max_batch_sequences=4, tokenizer_threads=2), chosen))
        return opened[-1]

    yield make
    for embedder, engine in opened:
        engine.let_go()
        embedder.close()


def random_ids(count: int, seed: int = 0) -> list[list[int]]:
    """Return `count` inputs. Each input repeats one id 1 to 32 times, and each input has a different id."""
    lengths = np.random.default_rng(seed).integers(1, LONGEST, count, endpoint=True)
    return [[10 + i] * int(length) for i, length in enumerate(lengths)]


def test_rows_are_in_the_order_of_the_inputs(make_fake: Any) -> None:
    embedder, engine = make_fake()
    inputs = random_ids(100)
    progress: list[tuple[int, int, int]] = []
    made = embedder.run(inputs, on_batch=lambda *figures: progress.append(figures), output="tokens")
    want = [fake_rows(np.array(it), D_MODEL) for it in inputs]
    np.testing.assert_array_equal(made.rows, np.concatenate(want))
    assert made.token_ids.tolist() == [it for ids in inputs for it in ids]
    assert made.lengths.tolist() == made.token_counts.tolist() == list(map(len, inputs))
    longest = [max(it) for it in engine.batches]
    assert longest == sorted(longest, reverse=True)
    assert [sum(it) for it in zip(*progress, strict=True)] == [100, made.tokens, made.padded_tokens]
    assert made.tokens == sum(map(len, inputs)) <= made.padded_tokens
    for rows, wanted in zip(embedder.embed(inputs, output="tokens"), want, strict=True):
        np.testing.assert_array_equal(rows, wanted)
    empty = embedder.run([], dtype="float16")
    assert (empty.rows.shape, empty.rows.dtype, empty.lengths.shape) == ((0, D_MODEL), np.float16, (0,))
    assert embedder.embed([], output="tokens") == []


def vectors(*marks: float) -> Any:
    rows = np.zeros((len(marks), D_MODEL), np.float32)
    rows[:, 0] = marks
    return rows


def test_a_model_of_embeddings_takes_vectors(make_fake: Any) -> None:
    embedder, _ = make_fake(takes_vectors=True)
    inputs = [vectors(5, 6), vectors(7).astype(np.float16), vectors(1, np.nan), vectors(8)[0], "text", [1, 2], []]
    made = embedder.run(inputs, output="tokens")
    want = [fake_rows(vectors(5, 6), D_MODEL), fake_rows(vectors(7), D_MODEL)]
    np.testing.assert_array_equal(made.rows, np.concatenate(want))
    assert made.token_ids is None
    assert made.refused[2] == "must be finite; was nan in row 1, column 0"
    assert made.refused[3].startswith("must be a text, a list of 64-bit ids, or a (seq, d_model) array")
    assert made.refused[4] == made.refused[5] == "model tiny takes embeddings only"
    assert list(made.refused) == [2, 3, 4, 5, 6]
    with pytest.raises(InvalidField):
        embedder.run(inputs)


BAD: list[tuple[Any, str]] = [
    ([5, 1000], "id 1 must be from 0 to 999 (the vocabulary of tiny); was 1000"),
    ([-1], "id 0 must be from 0 to 999"),
    ([], "must hold at least 1 id; was empty"),
    ([7] * 33, "must be at most 32 tokens (max_sequence_tokens of tiny); was 33. Set truncate, or split the input"),
    ("hello " * 40, "must be at most 32 tokens"),
    ([2**70], "must be a text, a list of 64-bit ids"),
    ([1.5], "must be a text"),
    ([[1], [1, 2]], "must be a text"),
    (None, "must be a text"),
    (vectors(1), "model tiny takes token ids or text"),
    ("x" * 300_000, "must be at most 262144 bytes (max_text_bytes); was 300000"),
]


def test_a_refused_input_does_not_stop_the_others(make_fake: Any) -> None:
    embedder, _ = make_fake()
    good = [[5, 6], "hello world", [8] * 32]
    inputs = [good[0], *(bad for bad, _ in BAD), *good[1:]]
    made = embedder.run(inputs)
    assert list(made.refused) == list(range(1, 1 + len(BAD)))
    for reason, (_, begin) in zip(made.refused.values(), BAD, strict=True):
        assert reason.startswith(begin)
    assert made.lengths.tolist() == [1, *[0] * len(BAD), 1, 1]
    assert made.token_counts.tolist() == [2, *[0] * len(BAD), 4, 32]
    np.testing.assert_array_equal(made.rows, embedder.embed(good))
    with pytest.raises(RequestError, match="ids 1, place 1: must be from 0 to 999"):
        embedder.embed(inputs)


def test_refused_inputs_leave_nothing_in_memory(make_fake: Any) -> None:
    """An error in a reference cycle would keep its input in memory until the cycle collector runs."""
    embedder, _ = make_fake()
    with collector_off():
        assert len(embedder.run([ids for ids, _ in BAD]).refused) == len(BAD)
        # `isinstance` would read `__class__`, and some objects of torch emit a warning if this attribute is read.
        assert not [it for it in gc.get_objects() if issubclass(type(it), RequestError)]


@pytest.mark.parametrize("output", ["mean", "tokens"])
def test_a_failed_input_does_not_affect_its_batch(make_fake: Any, output: Any) -> None:
    embedder, _ = make_fake(FakeEngine(D_MODEL, poison=13, nan_id=15))
    inputs = [[10 + i] * 4 for i in range(8)]
    made = embedder.run(inputs, output=output)
    assert made.refused == {
        3: "the model could not compute this input",
        5: "the model's result for this input has NaN or infinity",
    }
    assert made.reasons == {3: "INFERENCE_FAILED", 5: "INFERENCE_FAILED"}
    kept = [it for i, it in enumerate(inputs) if i not in made.refused]
    assert made.lengths.tolist() == [0 if i in (3, 5) else 4 if output == "tokens" else 1 for i in range(8)]
    np.testing.assert_array_equal(made.rows, embedder.run(kept, output=output).rows)
    with pytest.raises(InferenceFailed, match="input 3"):
        embedder.embed(inputs, output=output)


def test_an_engine_that_always_fails_refuses_no_input(make_fake: Any) -> None:
    embedder, engine = make_fake()
    engine.broken = True
    with pytest.raises(EngineUnhealthy, match="the device is lost"):
        embedder.run(random_ids(20))
    engine.broken, engine.nan_id = False, 0  # the probe of the engine has id 0, so the probe gets NaN
    with pytest.raises(EngineUnhealthy, match="NaN or infinity"):
        embedder.run([[0, 5], [0, 6]])
    engine.nan_id = None
    assert embedder.run(random_ids(20)).refused == {}


def test_threads_share_the_engine(make_fake: Any) -> None:
    """Six threads share one embedder, and every thread gets the right vectors.

    No batch gets the whole device. Otherwise, the timing of the threads would decide which batches run alone.
    """
    embedder, engine = make_fake(FakeEngine(D_MODEL, max_parallel_runs=2))
    calls = [random_ids(50, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda inputs: embedder.run(inputs, output="tokens"), calls))
    for inputs, found in zip(calls, made, strict=True):
        np.testing.assert_array_equal(found.rows, np.concatenate([fake_rows(np.array(it), D_MODEL) for it in inputs]))
    assert set(engine.alone) == {False}


def test_a_stopped_run_ends_after_the_current_batch(make_fake: Any) -> None:
    embedder, engine = make_fake()
    engine.hold()
    progress: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(embedder.run, random_ids(50), lambda rows, *_: progress.append(rows))
        engine.started.acquire()
        embedder.stop()
        engine.let_go()
        with pytest.raises(Stopped):
            running.result()
    assert len(engine.batches) == len(progress) == 1
    with pytest.raises(Stopped):
        embedder.embed([[5]])


def test_closing_waits_for_the_current_batch(make_fake: Any) -> None:
    embedder, engine = make_fake()
    engine.hold()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(embedder.run, random_ids(50))
        engine.started.acquire()
        closing = pool.submit(embedder.close)
        assert not engine.closed
        engine.let_go()
        closing.result()
        with pytest.raises(Stopped):
            running.result()
    embedder.close()
    assert engine.closed
    assert not [it for it in threading.enumerate() if it.name.startswith(("encserve-engine", "encserve-tokenize"))]


def test_an_error_of_a_callback_ends_the_run(make_fake: Any) -> None:
    embedder, engine = make_fake()

    def fail(*_: int) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        embedder.run(random_ids(50), fail)
    ran = len(engine.batches)
    assert embedder.embed([[5]]).shape == (1, D_MODEL)
    assert len(engine.batches) == ran + 1


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"output": "median"}, "output: must be one of 'model', .*; was 'median'"),
        ({"output": "sparse"}, "model tiny has no sparse"),
        ({"dtype": "float64"}, "dtype: must be one of 'float32', .*; was 'float64'"),
        ({"task": "question"}, "task: must be one of None, .*; was 'question'"),
        ({"task": "query"}, "tiny does not know query"),
        ({"prompt_name": "no"}, "tiny has no prompt 'no'"),
        ({"dimensions": 9}, "at most 4"),
        ({"dimensions": -1}, "dimensions: .* was -1"),
        ({"dimensions": 0}, "dimensions: must be at least 1, or left out; was 0"),
    ],
)
def test_a_bad_option_is_refused_without_inputs(make_fake: Any, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        make_fake()[0].run([], **asked)


def test_a_single_text_is_not_a_list(make_fake: Any) -> None:
    with pytest.raises(TypeError, match=r"\['hello'\]"):
        make_fake()[0].embed("hello")


def test_each_sparse_vector_has_its_own_indices(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, tokenizer=words(), **every_kind())
    with Embedder(bundle, tune_batches=False) as embedder:
        made = embedder.run(TEXTS, output="sparse")
        found = embedder.embed(TEXTS, output="sparse")
        refused = embedder.run([[VOCAB_SIZE], *TEXTS, []], output="sparse")
        with pytest.raises(ValueError, match="'multi_vector': use `arrays`"):
            embedder.run(TEXTS, output="multi_vector").sparse_vectors()
    assert [len(it.indices) for it in found] == made.lengths.tolist() == refused.lengths[1:-1].tolist()
    np.testing.assert_array_equal(np.concatenate([it.indices for it in found]), refused.indices)
    assert {it.width for it in found} == {made.sparse_width} == {VOCAB_SIZE}


# Batches


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.builds(BatchPolicy, st.integers(1, 100), st.integers(1, 8), st.floats(0, 1)),
)
def test_batches_have_every_input_once_and_are_full(lengths: list[int], policy: BatchPolicy) -> None:
    cut = batches(lengths, policy)
    order = [i for batch in cut for i in batch]
    assert order == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assert cut == batches(tuple(lengths), policy)

    def fits(batch: list[int]) -> bool:
        real = [lengths[i] for i in batch]
        padded = max(real) * len(real)
        within = len(real) <= policy.max_batch_sequences and padded <= policy.max_batch_tokens
        return within and padded - sum(real) <= policy.max_padding_fraction * padded

    assert all(fits(list(batch)) or len(batch) == 1 for batch in cut)
    for batch, following in itertools.pairwise(cut):
        assert not fits([*batch, following[0]])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("activation", ["none", "model", "sigmoid", "softmax"])
def test_scores_have_the_requested_type(tmp_path: Path, activation: Any, dtype: Any) -> None:
    head = tiny_heads.scores(labels=["a", "b"], activation=manifest_pb2.ACTIVATION_SOFTMAX)
    files = {"scores.onnx": tiny_heads.scores_file(2)}
    pairs, ids = [(text(5), text(6, 7)), (text(8), "")], [([5], [6, 7]), ([8], [])]
    bundle = write_bundle(tmp_path, tokenizer=words(), files=files, scores=head)
    with Embedder(bundle, tune_batches=False) as embedder:
        rows = embedder.run(pairs, output="scores", activation=activation, dtype=dtype).rows
    logits = tiny_heads.logits_of([tiny_heads.pair_ids(*it) for it in ids], labels=2)
    softmax = tiny_heads.softmax(logits)
    want = {"none": logits, "model": softmax, "sigmoid": tiny_heads.sigmoid(logits), "softmax": softmax}[activation]
    assert rows.dtype == np.dtype(dtype)
    np.testing.assert_allclose(rows, want, rtol=1e-5 if dtype == "float32" else 5e-3)


def test_the_reason_of_a_pair_names_the_query(tmp_path: Path) -> None:
    files, long = {"scores.onnx": tiny_heads.scores_file()}, "w5 " * 100_000
    bundle = write_bundle(tmp_path, tokenizer=words(), files=files, scores=tiny_heads.scores())
    with Embedder(bundle, tune_batches=False) as embedder:
        refused = embedder.run([("w5", "w6"), (long, "w6"), ("w5", long)], output="scores", truncate=True).refused
    problem = "must be at most 262144 bytes (max_text_bytes); was 300000"
    assert refused == {1: f"query {problem}", 2: problem}
