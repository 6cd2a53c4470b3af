"""Tests of multi-vector and sparse outputs: a real server and engine must return the same numbers as NumPy."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tiny_heads
from fake_server import Failed, FakeServer, make_input, sets
from http_calls import post
from open_inference import arrays_of_rest, infer, text_tensor
from tiny_bundle import LONGEST, VOCAB_SIZE, expected_rows, inspect_parts, table, write_bundle
from tiny_heads import (
    BEGIN,
    END,
    Serve,
    expected_vectors,
    expected_weights,
    multi_vector,
    npy,
    sparse,
    text,
    words,
)

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.protocols.encserve import codec

MASK, PROMPT, DOT = 3, 7, 9  # token ids; the word "w7" has the id 7
MULTI = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR)
SPARSE = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE)
QUERY, DOCUMENT = pb.TASK_QUERY, pb.TASK_DOCUMENT
LATE = {"multi_vector.onnx": tiny_heads.multi_vector_file()}
SPLADE = {"sparse.onnx": tiny_heads.sparse_file("max")}
TASKS = {
    "prompts": {"q": f"w{PROMPT} ", "other": "w8 "},
    "query": manifest_pb2.TaskSettings(
        prompt_name="q", max_tokens=8, expansion=manifest_pb2.Expansion(min_tokens=8, token_id=MASK, attended=False)
    ),
    "document": manifest_pb2.TaskSettings(max_tokens=20, skipped_token_ids=[DOT, END]),
    "multi_vector": multi_vector(similarity="meanmaxsim"),
}


def options(*specs: pb.OutputSpec, **more: Any) -> pb.EncodeOptions:
    return pb.EncodeOptions(outputs=specs, **more)


def vectors_spec(**fields: Any) -> pb.OutputSpec:
    return pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, **fields)


def sparse_pooling(name: str) -> Any:
    return manifest_pb2.SparsePooling.Value(f"SPARSE_POOLING_{name.upper()}")


def rows_of(ids: Any, attended: int | None = None) -> Any:
    """Return the expected hidden states (tokens, d_model) of the tiny graph for these ids.

    Every token attends only to the first `attended` tokens, or to all tokens if `attended` is None.
    """
    vectors = table()[ids]
    return vectors + vectors[:attended].mean(axis=0, keepdims=True)


def assert_weights(found: tuple[Any, Any], want: Any, rtol: float = 1e-4) -> None:
    """Check found (n, 1) weights and (n,) indices. `want` has the weights of the whole vocabulary, (vocabulary,)."""
    weights, indices = found
    assert indices.tolist() == np.flatnonzero(want).tolist()
    np.testing.assert_allclose(weights[:, 0], want[indices], rtol=rtol, atol=1e-5)


async def get_model(server: FakeServer) -> pb.ModelInfo:
    return pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model


async def test_every_token_has_a_vector(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector())
    inputs = [[5, 6, 7], [8], [4] * 30]
    vectors, rows = map(sets, (await server.encode(*inputs, options=options(MULTI, pb.OutputSpec()))).outputs)
    for ids, (found, indices), (row, none) in zip(inputs, vectors, rows, strict=True):
        np.testing.assert_allclose(found, expected_vectors(expected_rows(ids)), atol=1e-5)
        assert indices.tolist() == list(range(len(ids)))
        np.testing.assert_allclose(row, expected_rows(ids), atol=1e-5)
        assert none is None
    cut = vectors_spec(dimensions=2, l2_normalize=True)
    half = await server.encode([5, 6], options=options(cut, data_type=pb.DATA_TYPE_FLOAT16))
    want = expected_vectors(expected_rows([5, 6]))[:, :2]
    ((found, _),) = sets(half.outputs[0])
    np.testing.assert_allclose(found, want / np.linalg.norm(want, axis=1, keepdims=True), atol=1e-3)
    (floats,) = (await server.encode([5, 6], [7], options=options(cut))).outputs
    int8 = options(vectors_spec(dimensions=2), data_type=pb.DATA_TYPE_INT8)
    (bytes_,) = (await server.encode([5, 6], [7], options=int8)).outputs
    scaled = np.frombuffer(floats.data, "<f4") * np.float32(127 * np.sqrt(2) / 4)
    assert bytes_.data == np.clip(np.rint(scaled), -128, 127).astype(np.int8).tobytes()
    assert (bytes_.lengths, bytes_.indices, bytes_.l2_normalized) == (floats.lengths, floats.indices, True)
    model = await get_model(server)
    assert (model.multi_vector_width, model.multi_vector_similarity) == (tiny_heads.WIDTH, "maxsim")
    assert (model.sparse_width, list(model.tasks)) == (0, [])


# Tasks


async def test_a_query_has_a_prompt_and_unattended_tokens(serve: Serve) -> None:
    server = await serve(LATE, **TASKS)
    reply = await server.encode(text(5), text(5, 6, 10, 11), options=options(MULTI, task=QUERY))
    for its, info, (vectors, indices) in zip(
        ([5], [5, 6, 10, 11]), reply.sequences, sets(reply.outputs[0]), strict=True
    ):
        real = [BEGIN, PROMPT, *its, END]
        padding = 8 - len(real)
        assert (list(info.token_ids), info.token_count, info.truncated) == (real + [MASK] * padding, 8, False)
        assert list(info.special) == [True, False, *[False] * len(its), True, *[True] * padding]
        np.testing.assert_allclose(vectors, expected_vectors(rows_of(real + [MASK] * padding, len(real))), atol=1e-5)
        assert indices.tolist() == list(range(8))
    for name, prompt in (("other", [8]), ("", [])):
        reply = await server.encode(text(5), options=options(MULTI, task=QUERY, prompt_name=name))
        real = [BEGIN, *prompt, 5, END]
        assert list(reply.sequences[0].token_ids) == real + [MASK] * (8 - len(real))
    six = text(*range(10, 16))
    cut = (await server.encode(six, options=options(MULTI, task=QUERY, truncation=pb.TRUNCATION_END))).sequences[0]
    assert list(cut.token_ids) == [BEGIN, PROMPT, 10, 11, 12, 13, 14, END]
    assert (cut.truncated, cut.original_token_count) == (True, 9)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (six, {"task": QUERY}, r"inputs\[0\].text: .* 8 tokens .* TASK_QUERY"),
        ([5] * 21, {"task": DOCUMENT}, "20 tokens"),
        ([5], {"task": QUERY}, r"options.task: .* prompt .* inputs\[0\] is not a text"),
        ([5], {"task": QUERY, "prompt_name": ""}, r"options.task: .* inputs\[0\] is not a text"),
    ]
    for it, how, problem in refused:
        with pytest.raises(Failed, match=problem) as caught:
            await server.encode(it, options=options(MULTI, **how))
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list((await get_model(server)).tasks) == [
        pb.TaskInfo(task=QUERY, prompt_name="q", max_tokens=8, min_tokens=8),
        pb.TaskInfo(task=DOCUMENT, max_tokens=20),
    ]
    assert (await get_model(server)).multi_vector_similarity == "meanmaxsim"


async def test_some_tokens_of_a_document_have_no_vector(serve: Serve) -> None:
    """A call without a task skips the same tokens as a call for documents.

    But the call without a task uses the default prompt, and allows longer texts.
    """
    server = await serve(LATE, **TASKS, default_prompt_name="other")
    inputs: list[Any] = [text(5, DOT), text(DOT), [5, DOT, 6]]
    reply = await server.encode(*inputs, options=options(MULTI, task=DOCUMENT, prompt_name=""))
    for ids, (vectors, indices) in zip(
        ([BEGIN, 5, DOT, END], [BEGIN, DOT, END], [5, DOT, 6]), sets(reply.outputs[0]), strict=True
    ):
        kept = [i for i, it in enumerate(ids) if it not in (DOT, END)]
        np.testing.assert_allclose(vectors, expected_vectors(rows_of(ids))[kept], atol=1e-5)
        assert indices.tolist() == kept
    reply = await server.encode(text(5, DOT), text(*[5] * 30), options=options(MULTI))
    assert sets(reply.outputs[0])[0][1].tolist() == [0, 1, 2]
    assert list(reply.sequences[0].token_ids) == [BEGIN, 8, 5, DOT, END]
    assert reply.sequences[1].token_count == 33


async def test_a_document_may_have_no_vectors(serve: Serve) -> None:
    document = manifest_pb2.TaskSettings(kept_token_ids=[5, 6], skipped_token_ids=[6])
    heads = multi_vector(skips_first_token=True)
    server = await serve(LATE, multi_vector=heads, document=document, pooling=manifest_pb2.POOLING_UNSPECIFIED)
    reply = await server.encode(text(7), text(6), text(5, 8), options=options(MULTI, task=DOCUMENT))
    assert [indices.tolist() for _, indices in sets(reply.outputs[0])] == [[], [], [1]]
    (empty,) = (await server.encode(text(7), options=options(MULTI, task=DOCUMENT))).outputs
    assert (list(empty.lengths), empty.data, empty.indices) == ([0], b"", b"")
    reply = await server.encode([5], [5, 6, 5], options=options(MULTI, task=DOCUMENT))
    assert [indices.tolist() for _, indices in sets(reply.outputs[0])] == [[], [2]], "the first token has no vector"
    for chosen, problem in (
        (options(task=QUERY), "options.task: .* TASK_QUERY; .* TASK_DOCUMENT"),
        (options(pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)), r"outputs\[0\].kind: .*OUTPUT_KIND_MULTI_VECTOR"),
        (options(SPARSE), r"options.outputs\[0\].kind: model tiny has no OUTPUT_KIND_SPARSE"),
        (options(vectors_spec(dimensions=4)), r"options.outputs\[0\].dimensions: .* at most 3, .* was 4"),
        (options(vectors_spec(pool_factor=0.5)), r"options.outputs\[0\].pool_factor: .* was 0.5"),
    ):
        with pytest.raises(Failed, match=problem) as caught:
            await server.encode(text(5), options=chosen)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


def inspection(it: Any, **how: Any) -> pb.InspectRequest:
    last = pb.InspectSpec(kind=pb.INSPECT_KIND_HIDDEN_STATES, layers=[1])
    return pb.InspectRequest(input=make_input(it), tensors=[last], **how)


async def test_an_inspection_shows_the_encoded_sequence_of_its_task(serve: Serve, tmp_path: Path) -> None:
    parts = inspect_parts(tmp_path)
    server = await serve(LATE | parts.pop("files"), {"max_inspect_tokens": 10}, **parts, **TASKS)
    six = text(*range(10, 16))
    for it, how in (
        (text(5), {}),
        (text(5), {"task": QUERY}),
        (text(5), {"task": QUERY, "prompt_name": ""}),
        (text(5), {"task": DOCUMENT}),
        (six, {"task": QUERY, "truncation": pb.TRUNCATION_END}),
        ([5, DOT], {"task": DOCUMENT}),
    ):
        header, *chunks = await server.inspect(inspection(it, **how))
        info, reply = header.header.sequence, await server.encode(it, options=options(pb.OutputSpec(), **how))
        encoded = reply.sequences[0]
        assert list(info.token_ids) == (list(encoded.token_ids) or it)
        assert (info.truncated, info.original_token_count) == (encoded.truncated, encoded.original_token_count)
        data = b"".join(part.chunk.data for part in chunks)
        np.testing.assert_allclose(np.frombuffer(data, "<f4"), np.frombuffer(reply.outputs[0].data, "<f4"), atol=1e-6)
    for it, how, problem in (
        ([5], {"task": QUERY}, "task: .* input is not a text"),
        (six, {"task": QUERY}, r"input.text: .* 8 tokens .* TASK_QUERY .* was 9"),
        (text(*[5] * 9), {"task": DOCUMENT}, r"input.text: .* 10 tokens \(max_inspect_tokens .* was 11"),
        (text(5), {"task": 7}, "task: .* 0 to 2; was 7"),
    ):
        with pytest.raises(Failed, match=problem) as caught:
            await server.inspect(inspection(it, **how))
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_query_longer_than_an_inspection_may_be_is_refused(serve: Serve, tmp_path: Path) -> None:
    parts = inspect_parts(tmp_path)
    server = await serve(LATE | parts.pop("files"), {"max_inspect_tokens": 7}, **parts, **TASKS)
    with pytest.raises(Failed, match=r"task: with TASK_QUERY the text has 8 tokens, .* at most 7 tokens"):
        await server.inspect(inspection(text(5), task=QUERY))


# OpenVINO


async def test_openvino_gives_the_same_vectors(serve: Serve) -> None:
    """OpenVINO returns the expected vectors for a batch of two queries.

    The server adds tokens to the short query only. No token attends to the added tokens.
    """
    expansion = manifest_pb2.Expansion(min_tokens=8, token_id=MASK, attended=False)
    query = manifest_pb2.TaskSettings(expansion=expansion)
    server = await serve(LATE, engine="openvino", multi_vector=multi_vector(), query=query)
    reply = await server.encode(text(5), text(*range(10, 20)), options=options(MULTI, task=QUERY))
    short, long = ([BEGIN, 5, END, *[MASK] * 5], 3), ([BEGIN, *range(10, 20), END], 12)
    for (ids, attended), (vectors, _) in zip((short, long), sets(reply.outputs[0]), strict=True):
        np.testing.assert_allclose(vectors, expected_vectors(rows_of(ids, attended)), atol=1e-5)


# The Open Inference Protocol


async def assert_same_over_http(server: FakeServer, body: dict[str, Any], want: dict[str, Any]) -> None:
    """Check that the request returns these tensors over HTTP, both in JSON and in binary."""
    for binary in (False, True):
        parameters = {**body.get("parameters", {}), "binary_data_output": binary}
        got = arrays_of_rest(await post(server, "/v2/models/tiny/infer", body | {"parameters": parameters}))
        assert list(got) == list(want)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array, strict=True)


async def test_open_inference_pads_vectors(serve: Serve) -> None:
    document = manifest_pb2.TaskSettings(skipped_token_ids=[6, 7])
    server = await serve(LATE, {"http_port": 0}, multi_vector=multi_vector(), document=document)
    texts = [text(6, 7), text(5, 8, 9)]
    reply = await server.encode(*texts, options=options(MULTI, task=DOCUMENT))
    outputs, parameters = ["multi_vector", "multi_vector_lengths"], {"task": "document"}
    got = await infer(server, text=text_tensor(*texts), outputs=outputs, parameters=parameters)
    assert got["multi_vector_lengths"].tolist() == list(reply.outputs[0].lengths)
    for padded, (vectors, _) in zip(got["multi_vector"], sets(reply.outputs[0]), strict=True):
        np.testing.assert_array_equal(padded[: len(vectors)], vectors)
        assert not padded[len(vectors) :].any()
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [2], "data": texts}]
    named = [{"name": name} for name in outputs]
    await assert_same_over_http(server, {"inputs": inputs, "outputs": named, "parameters": parameters}, got)
    with pytest.raises(Failed, match="parameters.task: must be 'document'; was 'query'"):
        await infer(server, text=text_tensor(*texts), parameters={"task": "query"})


async def test_open_inference_pads_weights(serve: Serve) -> None:
    server = await serve(SPLADE, {"http_port": 0}, sparse=sparse())
    ids = [[5, 6, 7], [8, 9, 10]]
    reply = await server.encode(*ids, options=options(SPARSE))
    got = await infer(server, input_ids=np.array(ids))
    names = [f"sparse_{it}" for it in ("weights", "indices", "lengths")]
    assert list(got) == ["last_hidden_state", "lengths", "embedding", *names]
    assert got["sparse_lengths"].tolist() == list(reply.outputs[0].lengths)
    for i, (weights, indices) in enumerate(sets(reply.outputs[0])):
        np.testing.assert_array_equal(got["sparse_weights"][i, : len(weights)], weights[:, 0])
        np.testing.assert_array_equal(got["sparse_indices"][i, : len(weights)], indices)
        assert not got["sparse_weights"][i, len(weights) :].any()
    inputs = [{"name": "input_ids", "datatype": "INT64", "shape": [2, 3], "data": ids}]
    await assert_same_over_http(server, {"inputs": inputs}, got)


# Sparse weights


@pytest.mark.parametrize(
    ("engine", "pooling", "width", "max_vocabulary_mib"),
    [("onnxruntime", "max", VOCAB_SIZE, 512), ("onnxruntime", "sum", 50_000, 1), ("openvino", "sum", VOCAB_SIZE, 512)],
)
async def test_sparse_weights_are_those_above_zero(
    serve: Serve, engine: str, pooling: str, width: int, max_vocabulary_mib: int
) -> None:
    """A reply has exactly the weights above zero.

    If `max_vocabulary_mib` is 1, the server splits batches and long texts into parts.
    """
    server = await serve(
        {"sparse.onnx": tiny_heads.sparse_file(pooling, width)},
        {"max_vocabulary_mib": max_vocabulary_mib, "parallel_batches": 1},
        engine,
        sparse=sparse(pooling=sparse_pooling(pooling), width=width),
    )
    inputs = [[5, 6, 7], [8], [4, 5] * 16, [9]]
    reply = await server.encode(*inputs, options=options(SPARSE, pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)))
    for ids, found, (mean, _) in zip(inputs, *map(sets, reply.outputs), strict=True):
        assert_weights(found, expected_weights(expected_rows(ids), pooling, width))
        np.testing.assert_allclose(mean[0], expected_rows(ids).mean(axis=0), atol=1e-5)


async def test_the_largest_weights_are_kept(serve: Serve) -> None:
    server = await serve(SPLADE, sparse=sparse(max_active_dims=5))
    want = expected_weights(expected_rows([5, 6]), "max")
    for most, kept in ((0, 5), (3, 3), (VOCAB_SIZE, np.count_nonzero(want))):
        spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, max_active_dims=most)
        reply = await server.encode([5, 6], options=options(spec, data_type=pb.DATA_TYPE_FLOAT16))
        largest = np.zeros_like(want)
        largest[np.argsort(-want)[:kept]] = np.sort(want)[::-1][:kept]
        assert_weights(sets(reply.outputs[0])[0], largest, rtol=1e-3)
    assert (await get_model(server)).sparse_width == VOCAB_SIZE


async def test_every_token_has_a_weight_under_its_own_id(serve: Serve) -> None:
    """As in BGE-M3, a repeated token id gets the largest of its weights, and special tokens get no weight."""
    server = await serve(**tiny_heads.every_kind())
    reply = await server.encode(text(5, 6, 5, 20), text(8), text(6), options=options(SPARSE, MULTI))
    for info, found in zip(reply.sequences, sets(reply.outputs[0]), strict=True):
        ids = np.array(info.token_ids)
        want = np.zeros(VOCAB_SIZE)
        np.maximum.at(want, ids, (expected_rows(ids) @ tiny_heads.weights(1, 3))[:, 0])
        want[[BEGIN, END]] = 0
        assert_weights(found, want)


STATIC_WEIGHTS = np.linspace(-1, 1, VOCAB_SIZE, dtype=np.float32)
STATIC_WEIGHTS[6] = 0
STATIC = SPLADE | {"query.json": words(special=False).to_str().encode(), "query.npy": npy(STATIC_WEIGHTS)}
STATIC_TASK = manifest_pb2.TaskSettings(
    static_sparse=manifest_pb2.StaticSparse(tokenizer_file="query.json", weights_file="query.npy", max_tokens=6)
)


async def test_queries_with_static_weights_need_no_run(serve: Serve) -> None:
    server = await serve(STATIC, sparse=sparse(max_active_dims=3), query=STATIC_TASK)
    reply = await server.encode(text(5, 40, 5, 6), "", text(9, 8, 7, 10), options=options(SPARSE, task=QUERY))
    found = [(rows[:, 0].tolist(), indices.tolist()) for rows, indices in sets(reply.outputs[0])]
    assert found == [(STATIC_WEIGHTS[ids].tolist(), ids) for ids in ([5, 40], [], [7, 8, 9])]
    assert [list(info.token_ids) for info in reply.sequences] == [[5, 40, 5, 6], [], [9, 8, 7, 10]]
    assert server.sample("encserve_batches_total", model="tiny", version="1", closed_by="drained") == 0
    for it, specs, problem in (
        (text(*range(5, 12)), [SPARSE], r"inputs\[0\].text: .* 6 tokens"),
        ([5], [SPARSE], r"inputs\[0\]: .* needs a text"),
        (text(5), [SPARSE, pb.OutputSpec()], r"options.outputs\[1\].kind: .* OUTPUT_KIND_TOKENS in another call"),
    ):
        with pytest.raises(Failed, match=problem):
            await server.encode(it, options=options(*specs, task=QUERY))
    with pytest.raises(Failed, match=": outputs: .* in another call"):  # a request without outputs asks for all outputs
        await infer(server, text=text_tensor("w5"), parameters={"task": "query"})
    rows = await server.encode(text(5), options=options(task=QUERY))
    assert list(rows.sequences[0].token_ids) == [BEGIN, 5, END]
    assert len(sets((await server.encode(text(5), options=options(SPARSE))).outputs[0])[0][1]) == 3


async def test_calls_without_a_task_use_the_static_weights_of_documents(serve: Serve) -> None:
    server = await serve(STATIC, sparse=sparse(), document=STATIC_TASK)
    for task in (DOCUMENT, pb.TASK_UNSPECIFIED):
        ((_, indices),) = sets((await server.encode(text(5, 40), options=options(SPARSE, task=task))).outputs[0])
        assert indices.tolist() == [5, 40]


# The size of a reply


async def test_a_reply_with_too_many_weights_is_refused(serve: Serve) -> None:
    width = 200_000
    files = {"sparse.onnx": tiny_heads.sparse_file("max", width)}
    server = await serve(files, {"max_response_mib": 1}, sparse=sparse(width=width))
    inputs = [[i, 5] for i in range(5)]
    with pytest.raises(Failed, match="1048576 .* options.outputs.max_active_dims") as caught:
        await server.encode(*inputs, options=options(SPARSE))
    assert caught.value.reason == "RESPONSE_TOO_LARGE"
    spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, max_active_dims=100)
    assert list((await server.encode(*inputs, options=options(spec))).outputs[0].lengths) == [100] * 5


async def test_the_estimated_size_of_a_reply_is_never_too_low(serve: Serve) -> None:
    server = await serve(LATE | STATIC, multi_vector=multi_vector(), sparse=sparse())
    model = server.app.catalog.resolve("", "")
    for inputs in ([[5] * 64] * 20, [[5]], [text(*range(5, 40)), text()]):
        for specs in ([MULTI], [SPARSE], [MULTI, SPARSE, pb.OutputSpec()]):
            request = pb.EncodeRequest(inputs=map(make_input, inputs), options=options(*specs))
            reply = await model.prepare(await codec.decode_call(request, LONGEST, codec.check_counts(request, model)))
            await model.run(reply)
            assert len(await server.call("Encode", request)) <= reply.estimated_bytes


@pytest.mark.weekly
@pytest.mark.parametrize("pooling", ["max", "sum"])
async def test_the_memory_of_a_large_vocabulary_is_bounded(serve: Serve, pooling: str) -> None:
    """A call with eight texts of 512 tokens takes at most 512 MiB. The vocabulary has the size of XLM-R's vocabulary.

    The weights of all tokens at the same time would take about 4 GiB.
    """
    width = 250_002
    weights = tiny_heads.weights(width, 2) - np.float32(4)  # most weights become 0
    server = await serve(
        {"sparse.onnx": tiny_heads.sparse_file(pooling, width, weights)},
        encoder__max_sequence_tokens=512,
        sparse=sparse(width=width, pooling=sparse_pooling(pooling)),
    )
    inputs = [[i % VOCAB_SIZE for i in range(start, start + 512)] for start in range(8)]
    before_kib = reset_peak_kib()
    reply = await server.encode(*inputs, options=options(SPARSE))
    assert memory_kib("VmHWM") - before_kib <= 512 * 1024
    found, indices = sets(reply.outputs[0])[0]
    y = np.log1p(np.maximum(expected_rows(inputs[0]) @ weights[:, indices], 0))
    np.testing.assert_allclose(found[:, 0], y.max(axis=0) if pooling == "max" else y.sum(axis=0), rtol=1e-4, atol=1e-5)


def reset_peak_kib() -> int:
    """Reset the peak memory of the process to its current memory, and return the current memory in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kib("VmRSS")


def memory_kib(name: str) -> int:
    """Return a memory value of this process from /proc/self/status, in KiB; `name` is VmRSS or VmHWM."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.system
@pytest.mark.parametrize("kind", ["every kind", "model"])
def test_scipy_is_imported_before_the_first_call(tmp_path: Path, kind: str) -> None:
    """For a model with token pooling, loading imports SciPy, because the import takes seconds.

    Other models do not import SciPy.
    """
    bundle = write_bundle(tmp_path, **(tiny_heads.every_kind() if kind == "every kind" else {}))
    code = "import sys; from encserve_server.offline import Embedder; Embedder(sys.argv[1], tune_batches=False)"
    code += "; print('scipy.cluster.hierarchy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(kind == "every kind")
