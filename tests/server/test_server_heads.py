"""What models make of their rows: vectors for MaxSim and sparse weights, by task, through a real server and engine."""

import io
import itertools
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tiny_heads
from fake_server import Failed, FakeServer, make_input
from http_calls import post
from open_inference import arrays_of_rest, infer, text_tensor
from tiny_bundle import LONGEST, VOCAB_SIZE, expected_rows, inspect_parts, table
from tiny_heads import (
    BEGIN,
    END,
    Serve,
    expected_vectors,
    expected_weights,
    multi_vector,
    sets,
    sparse,
    text,
    words,
)

from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.outputs.token_pooling import pool_tokens
from encserve_server.rpc import codec
from encserve_server.types.bundles import TokenPooling

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MASK, PROMPT, DOT = 3, 7, 9  # ids; a word "w7" has the id 7
MULTI = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR)
SPARSE = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE)


def options(*specs: pb.OutputSpec, task: Any = pb.TASK_UNSPECIFIED, **more: Any) -> pb.EncodeOptions:
    return pb.EncodeOptions(outputs=specs, task=task, **more)


def rows_of(ids: Any, attended: int | None = None) -> Any:
    """What the tiny graph gives where all tokens see the first ones alone."""
    vectors = table()[ids]
    return vectors + vectors[:attended].mean(axis=0, keepdims=True)


LATE = {"multi_vector.onnx": tiny_heads.multi_vector_file()}


async def test_every_token_has_a_vector_and_the_last_hidden_state_is_there_too(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector())
    inputs = [[5, 6, 7], [8], [4] * 30]
    reply = await server.encode(*inputs, options=options(MULTI, pb.OutputSpec()))
    for ids, (vectors, indices), (rows, none) in zip(
        inputs, sets(reply.outputs[0]), sets(reply.outputs[1]), strict=True
    ):
        np.testing.assert_allclose(vectors, expected_vectors(expected_rows(ids)), atol=1e-5)
        assert indices.tolist() == list(range(len(ids)))
        np.testing.assert_allclose(rows, expected_rows(ids), atol=1e-5)
        assert none is None
    model = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert (model.multi_vector_width, model.multi_vector_similarity) == (tiny_heads.WIDTH, "maxsim")
    assert (model.sparse_width, list(model.tasks)) == (0, [])


async def test_vectors_are_cut_normalised_and_halved(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector())
    spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, dimensions=2, l2_normalize=True)
    reply = await server.encode([5, 6], options=options(spec, data_type=pb.DATA_TYPE_FLOAT16))
    want = expected_vectors(expected_rows([5, 6]))[:, :2]
    ((vectors, _),) = sets(reply.outputs[0])
    np.testing.assert_allclose(vectors, want / np.linalg.norm(want, axis=1, keepdims=True), atol=1e-3)


async def test_vectors_of_int8(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector())
    spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, dimensions=2)
    (tensor,) = (await server.encode([5, 6], [7], options=options(spec, data_type=pb.DATA_TYPE_INT8))).outputs
    unit = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, dimensions=2, l2_normalize=True)
    (wanted,) = (await server.encode([5, 6], [7], options=options(unit))).outputs
    numbers = np.frombuffer(wanted.data, "<f4") * np.float32(127 * np.sqrt(2) / 4)
    assert tensor.data == np.clip(np.rint(numbers), -128, 127).astype(np.int8).tobytes()
    assert (tensor.lengths, tensor.indices, tensor.l2_normalized) == (wanted.lengths, wanted.indices, True)


async def test_weights_of_int8_are_refused(serve: Serve) -> None:
    server = await serve({"sparse.onnx": tiny_heads.sparse_file("max")}, sparse=sparse())
    with pytest.raises(Failed, match="DATA_TYPE_INT8 is not for OUTPUT_KIND_SPARSE, see options.outputs"):
        await server.encode([5, 6], options=options(SPARSE, data_type=pb.DATA_TYPE_INT8))


TASKS = {
    "prompts": {"q": f"w{PROMPT} ", "other": "w8 "},
    "query": manifest_pb2.TaskSettings(
        prompt_name="q", max_tokens=8, expansion=manifest_pb2.Expansion(min_tokens=8, token_id=MASK, attended=False)
    ),
    "document": manifest_pb2.TaskSettings(max_tokens=20, skipped_token_ids=[DOT, END]),
    "multi_vector": multi_vector(similarity="meanmaxsim"),
}


async def test_queries_and_documents_are_treated_as_the_model_was_trained(serve: Serve) -> None:
    """A query has a prompt, and tokens that nobody sees but have vectors; a document has none for its full stops."""
    server = await serve(LATE, **TASKS)
    query, longer = (
        await server.encode(text(5), text(5, 6, 10, 11), options=options(MULTI, task=pb.TASK_QUERY)),
        await server.encode(*[text(5, DOT), text(DOT), text(6)], options=options(MULTI, task=pb.TASK_DOCUMENT)),
    )
    for words_of, info, (vectors, indices) in zip(
        ([5], [5, 6, 10, 11]), query.sequences, sets(query.outputs[0]), strict=True
    ):
        real = [BEGIN, PROMPT, *words_of, END]
        ids = real + [MASK] * (8 - len(real))
        assert (list(info.token_ids), info.token_count, info.truncated) == (ids, 8, False)
        assert list(info.special) == [True, False, *[False] * len(words_of), True, *[True] * (8 - len(real))]
        np.testing.assert_allclose(vectors, expected_vectors(rows_of(ids, len(real))), atol=1e-5)
        assert indices.tolist() == list(range(8))
    for ids, (vectors, indices) in zip(
        ([BEGIN, 5, DOT, END], [BEGIN, DOT, END], [BEGIN, 6, END]), sets(longer.outputs[0]), strict=True
    ):
        kept = [i for i, it in enumerate(ids) if it not in (DOT, END)]
        np.testing.assert_allclose(vectors, expected_vectors(rows_of(ids))[kept], atol=1e-5)
        assert indices.tolist() == kept


async def test_openvino_makes_the_same_of_its_rows(serve: Serve) -> None:
    """Beside a longer query, which has no tokens that nobody sees."""
    minimum = manifest_pb2.TaskSettings(expansion=manifest_pb2.Expansion(min_tokens=8, token_id=MASK, attended=False))
    server = await serve(LATE, engine="openvino", multi_vector=multi_vector(), query=minimum)
    reply = await server.encode(text(5), text(*range(10, 20)), options=options(MULTI, task=pb.TASK_QUERY))
    short, long = ([BEGIN, 5, END, *[MASK] * 5], 3), ([BEGIN, *range(10, 20), END], 12)
    for (ids, seen), (vectors, _) in zip((short, long), sets(reply.outputs[0]), strict=True):
        np.testing.assert_allclose(vectors, expected_vectors(rows_of(ids, seen)), atol=1e-5)


async def test_openvino_makes_sparse_weights(serve: Serve) -> None:
    pooling = manifest_pb2.SPARSE_POOLING_SUM
    files = {"sparse.onnx": tiny_heads.sparse_file("sum")}
    server = await serve(files, engine="openvino", sparse=sparse(pooling=pooling))
    reply = await server.encode([5, 6, 7], [8], options=options(SPARSE))
    for ids, (found, indices) in zip(([5, 6, 7], [8]), sets(reply.outputs[0]), strict=True):
        want = expected_weights(expected_rows(ids), "sum")
        assert indices.tolist() == np.flatnonzero(want).tolist()
        np.testing.assert_allclose(found[:, 0], want[indices], rtol=1e-4, atol=1e-5)


async def test_a_call_of_no_task_is_of_a_document_with_the_default_prompt(serve: Serve) -> None:
    server = await serve(LATE, **TASKS, default_prompt_name="other")
    reply = await server.encode(text(5, DOT), text(*[5] * 30), options=options(MULTI))
    ((_, indices), _) = sets(reply.outputs[0])
    assert list(reply.sequences[0].token_ids) == [BEGIN, 8, 5, DOT, END]
    assert indices.tolist() == [0, 1, 2]
    assert reply.sequences[1].token_count == 33  # beyond a document's longest


async def test_a_prompt_beside_a_task_replaces_the_prompt_alone(serve: Serve) -> None:
    server = await serve(LATE, **TASKS)
    for name, prompt in (("other", [8]), ("", [])):
        reply = await server.encode(text(5), options=options(MULTI, task=pb.TASK_QUERY, prompt_name=name))
        real = [BEGIN, *prompt, 5, END]
        assert list(reply.sequences[0].token_ids) == real + [MASK] * (8 - len(real))


def inspection(it: Any, **how: Any) -> pb.InspectRequest:
    last = pb.InspectSpec(kind=pb.INSPECT_KIND_HIDDEN_STATES, layers=[1])
    return pb.InspectRequest(input=make_input(it), tensors=[last], **how)


async def test_what_is_inspected_is_what_is_encoded_for_its_task(serve: Serve, tmp_path: Path) -> None:
    its = inspect_parts(tmp_path)
    server = await serve(LATE | its.pop("files"), **its, **TASKS, default_prompt_name="other")
    six = text(*range(10, 16))
    for it, how in (
        (text(5), {}),
        (text(5), {"task": pb.TASK_QUERY}),
        (text(5), {"task": pb.TASK_QUERY, "prompt_name": ""}),
        (text(5), {"task": pb.TASK_DOCUMENT}),
        (six, {"task": pb.TASK_QUERY, "truncation": pb.TRUNCATION_END}),
        ([5, DOT], {"task": pb.TASK_DOCUMENT}),
    ):
        header, *chunks = await server.inspect(inspection(it, **how))
        info, due = header.header.sequence, await server.encode(it, options=options(pb.OutputSpec(), **how))
        wanted = due.sequences[0]
        assert list(info.token_ids) == (list(wanted.token_ids) or it)
        assert (info.truncated, info.original_token_count) == (wanted.truncated, wanted.original_token_count)
        data = b"".join(part.chunk.data for part in chunks)
        np.testing.assert_allclose(np.frombuffer(data, "<f4"), np.frombuffer(due.outputs[0].data, "<f4"), atol=1e-6)


@pytest.mark.parametrize(
    ("it", "how", "problem"),
    [
        (
            [5],
            {"task": pb.TASK_QUERY},
            "task: TASK_QUERY puts a prompt .* behind short texts; input is not a text: send text",
        ),
        (text(*range(10, 16)), {"task": pb.TASK_QUERY}, r"input.text: .* 8 tokens \(max_tokens of TASK_QUERY .* was 9"),
        (
            text(*[5] * 9),
            {"task": pb.TASK_DOCUMENT},
            r"input.text: .* 10 tokens \(max_inspect_tokens of tiny\); was 11",
        ),
        (text(5), {"task": 7}, "task: must be a value of Task, 0 to 2; was 7"),
    ],
)
async def test_a_task_that_cannot_be_inspected(
    serve: Serve, tmp_path: Path, it: Any, how: dict[str, Any], problem: str
) -> None:
    its = inspect_parts(tmp_path)
    server = await serve(LATE | its.pop("files"), {"max_inspect_tokens": 10}, **its, **TASKS)
    with pytest.raises(Failed, match=problem) as caught:
        await server.inspect(inspection(it, **how))
    assert caught.value.code is INVALID


async def test_a_query_made_longer_than_can_be_inspected_is_refused(serve: Serve, tmp_path: Path) -> None:
    its = inspect_parts(tmp_path)
    server = await serve(LATE | its.pop("files"), {"max_inspect_tokens": 7}, **its, **TASKS)
    with pytest.raises(Failed, match=r"task: TASK_QUERY makes texts 8 tokens long, and at most 7 can be inspected"):
        await server.inspect(inspection(text(5), task=pb.TASK_QUERY))


async def test_a_model_of_no_pooling_says_what_it_makes(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector(), pooling=manifest_pb2.POOLING_UNSPECIFIED)
    with pytest.raises(Failed, match="tiny has no OUTPUT_KIND_MODEL_POOLING; it has .*, OUTPUT_KIND_MULTI_VECTOR"):
        await server.encode([5], options=options(pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)))


async def test_a_text_of_nothing_that_counts_has_no_vectors(serve: Serve) -> None:
    document = manifest_pb2.TaskSettings(kept_token_ids=[5, 6], skipped_token_ids=[6])
    server = await serve(LATE, multi_vector=multi_vector(), document=document)
    reply = await server.encode(text(7), text(6), text(5, 8), options=options(MULTI, task=pb.TASK_DOCUMENT))
    assert [indices.tolist() for _, indices in sets(reply.outputs[0])] == [[], [], [1]]
    empty = await server.encode(text(7), options=options(MULTI, task=pb.TASK_DOCUMENT))
    assert (list(empty.outputs[0].lengths), empty.outputs[0].data, empty.outputs[0].indices) == ([0], b"", b"")


async def assert_same_over_http(server: FakeServer, body: dict[str, Any], want: dict[str, Any]) -> None:
    """That the same request gives the same tensors over HTTP, in JSON and as bytes."""
    for as_bytes in (False, True):
        parameters = {**body.get("parameters", {}), "binary_data_output": as_bytes}
        got = arrays_of_rest(await post(server, "/v2/models/tiny/infer", body | {"parameters": parameters}))
        assert list(got) == list(want)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array, strict=True)


async def test_sets_of_vectors_are_padded_in_the_open_inference_protocol(serve: Serve) -> None:
    document = manifest_pb2.TaskSettings(skipped_token_ids=[6, 7])
    server = await serve(LATE, {"http_port": 0}, multi_vector=multi_vector(), document=document)
    texts = [text(6, 7), text(5, 8, 9)]
    reply = await server.encode(*texts, options=options(MULTI, task=pb.TASK_DOCUMENT))
    outputs = ["multi_vector", "multi_vector_lengths"]
    got = await infer(server, text=text_tensor(*texts), outputs=outputs, parameters={"task": "document"})
    assert got["multi_vector_lengths"].tolist() == list(reply.outputs[0].lengths)
    for padded, (vectors, _) in zip(got["multi_vector"], sets(reply.outputs[0]), strict=True):
        np.testing.assert_array_equal(padded[: len(vectors)], vectors)
        assert not padded[len(vectors) :].any()
    body = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": texts}],
        "outputs": [{"name": name} for name in outputs],
        "parameters": {"task": "document"},
    }
    await assert_same_over_http(server, body, got)
    with pytest.raises(Failed, match="parameters.task: must be 'document'; was 'query'"):
        await infer(server, text=text_tensor(*texts), parameters={"task": "query"})


async def test_weights_are_padded_in_the_open_inference_protocol(serve: Serve) -> None:
    server = await serve({"sparse.onnx": tiny_heads.sparse_file("max")}, {"http_port": 0}, sparse=sparse())
    ids = [[5, 6, 7], [8, 9, 10]]
    reply = await server.encode(*ids, options=options(SPARSE))
    got = await infer(server, input_ids=np.array(ids))
    assert list(got) == [
        "last_hidden_state",
        "lengths",
        "embedding",
        *(f"sparse_{it}" for it in ("weights", "indices", "lengths")),
    ]
    assert got["sparse_lengths"].tolist() == list(reply.outputs[0].lengths)
    for i, (weights, indices) in enumerate(sets(reply.outputs[0])):
        np.testing.assert_array_equal(got["sparse_weights"][i, : len(weights)], weights[:, 0])
        np.testing.assert_array_equal(got["sparse_indices"][i, : len(weights)], indices)
        assert not got["sparse_weights"][i, len(weights) :].any()
    inputs = [{"name": "input_ids", "datatype": "INT64", "shape": [2, 3], "data": ids}]
    await assert_same_over_http(server, {"inputs": inputs}, got)


async def test_the_first_token_may_have_no_vector(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector(skips_first_token=True))
    reply = await server.encode([5], [6, 7, 8], options=options(MULTI))
    assert [indices.tolist() for _, indices in sets(reply.outputs[0])] == [[], [1, 2]]


async def test_the_longest_text_is_the_tasks(serve: Serve) -> None:
    server = await serve(LATE, **TASKS)
    six = text(*range(10, 16))
    with pytest.raises(
        Failed, match=r"inputs\[0\].text: must be at most 8 tokens \(max_tokens of TASK_QUERY of tiny\)"
    ):
        await server.encode(six, options=options(MULTI, task=pb.TASK_QUERY))
    cut = await server.encode(six, options=options(MULTI, task=pb.TASK_QUERY, truncation=pb.TRUNCATION_END))
    assert list(cut.sequences[0].token_ids) == [BEGIN, PROMPT, 10, 11, 12, 13, 14, END]
    assert (cut.sequences[0].truncated, cut.sequences[0].original_token_count) == (True, 9)
    with pytest.raises(Failed, match="must be at most 20 tokens"):
        await server.encode([5] * 21, options=options(MULTI, task=pb.TASK_DOCUMENT))


async def test_the_model_says_how_it_treats_tasks(serve: Serve) -> None:
    server = await serve(LATE, **TASKS)
    model = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert list(model.tasks) == [
        pb.TaskInfo(task=pb.TASK_QUERY, prompt_name="q", max_tokens=8, min_tokens=8),
        pb.TaskInfo(task=pb.TASK_DOCUMENT, max_tokens=20),
    ]
    assert model.multi_vector_similarity == "meanmaxsim"


def sent(*inputs: Any, options: pb.EncodeOptions) -> tuple[tuple[Any, ...], pb.EncodeOptions]:
    return inputs, options


REFUSED = {
    "ids that a task would change": (
        sent(text(5), [5], options=options(MULTI, task=pb.TASK_QUERY)),
        r"options.task: TASK_QUERY puts a prompt before texts and puts tokens behind short texts; "
        r"inputs\[1\] is not a text",
    ),
    "ids that an expansion would change": (
        sent([5], options=options(MULTI, task=pb.TASK_QUERY, prompt_name="")),
        r"options.task: TASK_QUERY puts tokens behind short texts; inputs\[0\] is not a text",
    ),
    "no weights": (
        sent([5], options=options(SPARSE)),
        r"options.outputs\[0\].kind: model tiny has no OUTPUT_KIND_SPARSE",
    ),
    "too wide": (
        sent([5], options=options(pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, dimensions=4))),
        r"options.outputs\[0\].dimensions: must be at most 3, the numbers of a row; was 4",
    ),
    "too small a factor": (
        sent([5], options=options(pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, pool_factor=0.5))),
        r"options.outputs\[0\].pool_factor: must be a number from 1; was 0.5",
    ),
    "a factor out of range": (
        sent([5], options=options(pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, pool_factor=float("nan")))),
        r"options.outputs\[0\].pool_factor: must be a number from 1; was nan",
    ),
    "queries joined": (
        sent(
            text(5), options=options(pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, pool_factor=2), task=pb.TASK_QUERY)
        ),
        r"options.outputs\[0\].pool_factor: is not for TASK_QUERY",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_wrong_use_is_refused_by_field_and_number(serve: Serve, name: str) -> None:
    (inputs, chosen), problem = REFUSED[name]
    server = await serve(LATE, **TASKS)
    with pytest.raises(Failed, match=problem) as caught:
        await server.encode(*inputs, options=chosen)
    assert (caught.value.code, caught.value.reason) == (INVALID, "INVALID_FIELD")


async def test_a_task_that_only_leaves_tokens_out_holds_for_ids_too(serve: Serve) -> None:
    server = await serve(LATE, **TASKS)
    reply = await server.encode([5, DOT, 6], options=options(MULTI, task=pb.TASK_DOCUMENT))
    ((vectors, indices),) = sets(reply.outputs[0])
    np.testing.assert_allclose(vectors, expected_vectors(rows_of([5, DOT, 6]))[[0, 2]], atol=1e-5)
    assert indices.tolist() == [0, 2]


async def test_a_task_that_the_model_does_not_know(serve: Serve) -> None:
    server = await serve(LATE, multi_vector=multi_vector(), document=manifest_pb2.TaskSettings())
    with pytest.raises(
        Failed, match="options.task: model tiny does not know TASK_QUERY; it knows TASK_DOCUMENT"
    ) as caught:
        await server.encode(text(5), options=options(task=pb.TASK_QUERY))
    assert caught.value.code is INVALID


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("max_vocabulary_mib", [512, 1])
async def test_sparse_weights_are_those_that_are_not_zero(serve: Serve, pooling: str, max_vocabulary_mib: int) -> None:
    """Through parts of the batch, and slices of the text, where memory is short."""
    width = 50_000 if max_vocabulary_mib == 1 else VOCAB_SIZE
    kind = manifest_pb2.SparsePooling.Value(f"SPARSE_POOLING_{pooling.upper()}")
    server = await serve(
        {"sparse.onnx": tiny_heads.sparse_file(pooling, width)},
        {"max_vocabulary_mib": max_vocabulary_mib, "parallel_batches": 1},
        sparse=sparse(pooling=kind, width=width),
    )
    inputs = [[5, 6, 7], [8], [4, 5] * 16, [9]]
    reply = await server.encode(*inputs, options=options(SPARSE, pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)))
    for ids, (found, indices) in zip(inputs, sets(reply.outputs[0]), strict=True):
        want = expected_weights(expected_rows(ids), pooling, width)
        assert indices.tolist() == np.flatnonzero(want).tolist()
        np.testing.assert_allclose(found[:, 0], want[indices], rtol=1e-4, atol=1e-5)
    for ids, (mean, _) in zip(inputs, sets(reply.outputs[1]), strict=True):
        np.testing.assert_allclose(mean[0], expected_rows(ids).mean(axis=0), atol=1e-5)


async def test_the_largest_weights_are_kept(serve: Serve) -> None:
    server = await serve({"sparse.onnx": tiny_heads.sparse_file("max")}, sparse=sparse(max_active_dims=5))
    want = expected_weights(expected_rows([5, 6]), "max")
    for most, kept in ((0, 5), (3, 3), (VOCAB_SIZE, np.count_nonzero(want))):
        spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, max_active_dims=most)
        reply = await server.encode([5, 6], options=options(spec, data_type=pb.DATA_TYPE_FLOAT16))
        ((found, indices),) = sets(reply.outputs[0])
        assert indices.tolist() == sorted(np.argsort(-want)[:kept].tolist())
        np.testing.assert_allclose(found[:, 0], want[indices], rtol=1e-3)
    model = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert model.sparse_width == VOCAB_SIZE


async def test_every_token_has_a_weight_under_its_own_id(serve: Serve) -> None:
    """As BGE-M3: the largest of a token that stands twice, above 0, and none for special tokens."""
    own_id = sparse(pooling=manifest_pb2.SPARSE_POOLING_OWN_ID, mask_name="", skipped_token_ids=[BEGIN, END])
    server = await serve({"sparse.onnx": tiny_heads.own_id_file()} | LATE, sparse=own_id, multi_vector=multi_vector())
    inputs = [text(5, 6, 5, 20), text(8), text(6)]
    reply = await server.encode(*inputs, options=options(SPARSE, MULTI))
    for info, (found, indices) in zip(reply.sequences, sets(reply.outputs[0]), strict=True):
        ids = list(info.token_ids)
        scores = (expected_rows(ids) @ tiny_heads.weights(1, 3))[:, 0]
        want: dict[int, float] = {}
        for it, score in zip(ids, scores, strict=True):
            if score > 0 and it not in (BEGIN, END):
                want[it] = max(want.get(it, 0), score)
        assert indices.tolist() == sorted(want)
        np.testing.assert_allclose(found[:, 0], [want[it] for it in sorted(want)], rtol=1e-4)


REFUSED_SPARSE = {
    "dimensions": (
        pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, dimensions=1),
        "dimensions: is not for OUTPUT_KIND_SPARSE",
    ),
    "normalised": (
        pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, l2_normalize=True),
        "l2_normalize: is not for OUTPUT_KIND_SPARSE",
    ),
    "joined": (
        pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, pool_factor=2),
        "pool_factor: is for OUTPUT_KIND_MULTI_VECTOR",
    ),
}


@pytest.mark.parametrize("name", REFUSED_SPARSE)
async def test_what_sparse_weights_cannot_be(serve: Serve, name: str) -> None:
    spec, problem = REFUSED_SPARSE[name]
    server = await serve({"sparse.onnx": tiny_heads.sparse_file("max")}, sparse=sparse())
    with pytest.raises(Failed, match=problem) as caught:
        await server.encode([5], options=options(spec))
    assert caught.value.code is INVALID


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


STATIC_WEIGHTS = np.linspace(-1, 1, VOCAB_SIZE, dtype=np.float32)
STATIC_WEIGHTS[6] = 0
STATIC = {
    "sparse.onnx": tiny_heads.sparse_file("max"),
    "query.json": words(special=False).to_str().encode(),
    "query.npy": npy(STATIC_WEIGHTS),
}
STATIC_QUERY = manifest_pb2.TaskSettings(
    static_sparse=manifest_pb2.StaticSparse(tokenizer_file="query.json", weights_file="query.npy", max_tokens=6)
)


async def test_queries_may_be_answered_without_a_run(serve: Serve) -> None:
    server = await serve(STATIC, sparse=sparse(max_active_dims=3), query=STATIC_QUERY)
    reply = await server.encode(text(5, 40, 5, 6), "", text(9, 8, 7, 10), options=options(SPARSE, task=pb.TASK_QUERY))
    found = [(rows[:, 0].tolist(), indices.tolist()) for rows, indices in sets(reply.outputs[0])]
    want = [[5, 40], [], [7, 8, 9]]
    assert found == [(STATIC_WEIGHTS[ids].tolist(), ids) for ids in want]
    assert [list(info.token_ids) for info in reply.sequences] == [[5, 40, 5, 6], [], [9, 8, 7, 10]]
    assert server.sample("encserve_batches_total", model="tiny", version="1", closed_by="drained") == 0
    with pytest.raises(Failed, match=r"inputs\[0\].text: must be at most 6 tokens"):
        await server.encode(text(*range(5, 12)), options=options(SPARSE, task=pb.TASK_QUERY))
    for call, problem in (
        (sent([5], options=options(SPARSE, task=pb.TASK_QUERY)), r"inputs\[0\]: .* from texts only"),
        (
            sent(text(5), options=options(SPARSE, pb.OutputSpec(), task=pb.TASK_QUERY)),
            r"options.outputs\[1\].kind: .* ask for OUTPUT_KIND_TOKENS in another call",
        ),
    ):
        with pytest.raises(Failed, match=problem):
            await server.encode(*call[0], options=call[1])
    with pytest.raises(Failed, match=": outputs: .* in another call"):  # all that there are, where none is named
        await infer(server, text=text_tensor("w5"), parameters={"task": "query"})
    rows = await server.encode(text(5), options=options(task=pb.TASK_QUERY))
    (sets_of_a_document,) = sets((await server.encode(text(5), options=options(SPARSE))).outputs[0])
    assert len(sets_of_a_document[1]) == 3
    assert list(rows.sequences[0].token_ids) == [BEGIN, 5, END]


async def test_a_reply_whose_weights_turn_out_too_many_is_refused(serve: Serve) -> None:
    width = 200_000
    server = await serve(
        {"sparse.onnx": tiny_heads.sparse_file("max", width)}, {"max_response_mib": 1}, sparse=sparse(width=width)
    )
    with pytest.raises(
        Failed, match="over the limit of 1048576 .*; fewer inputs, or options.outputs.max_active_dims"
    ) as caught:
        await server.encode(*[[i, 5] for i in range(5)], options=options(SPARSE))
    assert caught.value.reason == "RESPONSE_TOO_LARGE"
    spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_SPARSE, max_active_dims=100)
    reply = await server.encode(*[[i, 5] for i in range(5)], options=options(spec))
    assert list(reply.outputs[0].lengths) == [100] * 5


@pytest.mark.parametrize("own_factor", [0.0, 1.0, 2.0])
async def test_vectors_that_are_alike_are_joined(serve: Serve, own_factor: float) -> None:
    """By the model, for documents, and then by the call; joined vectors come from no one token."""
    document = manifest_pb2.TaskSettings()
    if own_factor:
        document.token_pooling.CopyFrom(manifest_pb2.TokenPooling(factor=own_factor, protected_tokens=1))
    server = await serve(LATE, multi_vector=multi_vector(), document=document, query=manifest_pb2.TaskSettings())
    ids = list(range(5, 25))
    every = expected_vectors(rows_of(ids))
    for asked, task in itertools.product((0, 1, 1.5, 3), (pb.TASK_DOCUMENT, pb.TASK_UNSPECIFIED)):
        spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, pool_factor=asked)
        ((vectors, indices),) = sets((await server.encode(ids, options=options(spec, task=task))).outputs[0])
        want = every.astype(np.float32)
        for factor, unit in ((own_factor, False), (asked, True)):
            if factor:
                want = pool_tokens(want, TokenPooling(factor, l2_normalize=unit))
        np.testing.assert_allclose(vectors, want, atol=1e-5)
        assert (indices is None) == (max(own_factor, asked) > 1)
    ((vectors, _),) = sets((await server.encode(ids, options=options(MULTI, task=pb.TASK_QUERY))).outputs[0])
    np.testing.assert_allclose(vectors, every, atol=1e-5)


async def test_a_server_that_cannot_join_vectors_says_so(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encserve_server.outputs.token_pooling.importlib.util.find_spec", lambda name: None)
    server = await serve(LATE, multi_vector=multi_vector())
    spec = pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR, pool_factor=2)
    with pytest.raises(Failed, match=r"pool_factor: this server cannot .* it lacks encserve-server\[pooling\]"):
        await server.encode([5, 6], options=options(spec))


@pytest.mark.system  # importing sentence-transformers takes seconds
@pytest.mark.parametrize("pooling", ["max", "sum"])
async def test_the_memory_of_a_large_vocabulary_is_bounded(serve: Serve, pooling: str) -> None:
    """XLM-R's, for eight texts of 512 tokens at once: all of it would be 4 GiB."""
    width = 250_002
    table = tiny_heads.weights(width, 2) - np.float32(4)  # so that most weights are 0
    server = await serve(
        {"sparse.onnx": tiny_heads.sparse_file(pooling, width, table)},
        encoder__max_sequence_tokens=512,
        sparse=sparse(width=width, pooling=manifest_pb2.SparsePooling.Value(f"SPARSE_POOLING_{pooling.upper()}")),
    )
    inputs = [[i % VOCAB_SIZE for i in range(start, start + 512)] for start in range(8)]
    before_kib = forget_peak()
    reply = await server.encode(*inputs, options=options(SPARSE))
    assert memory_kib("VmHWM") - before_kib <= 512 * 1024
    ((found, indices), *_) = sets(reply.outputs[0])
    y = np.log1p(np.maximum(expected_rows(inputs[0]) @ table[:, indices], 0))
    np.testing.assert_allclose(found[:, 0], y.max(axis=0) if pooling == "max" else y.sum(axis=0), rtol=1e-4, atol=1e-5)


def forget_peak() -> int:
    """The memory of this process in KiB; its peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kib("VmRSS")


def memory_kib(name: str) -> int:
    """A figure of this process, as Linux has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


async def test_documents_without_a_run_are_also_texts_of_no_task(serve: Serve) -> None:
    server = await serve(STATIC, sparse=sparse(), document=STATIC_QUERY)
    for task in (pb.TASK_DOCUMENT, pb.TASK_UNSPECIFIED):
        ((_, indices),) = sets((await server.encode(text(5, 40), options=options(SPARSE, task=task))).outputs[0])
        assert indices.tolist() == [5, 40]


async def test_the_estimate_of_a_reply_is_never_too_low(serve: Serve) -> None:
    server = await serve(LATE | STATIC, multi_vector=multi_vector(), sparse=sparse())
    model = server.app.catalog.resolve("", "")
    for inputs in ([[5] * 64] * 20, [[5]], [text(*range(5, 40)), text()]):
        for specs in ([MULTI], [SPARSE], [MULTI, SPARSE, pb.OutputSpec()]):
            request = pb.EncodeRequest(inputs=map(make_input, inputs), options=options(*specs))
            reply = await model.prepare(codec.decode_call(request, LONGEST, codec.check_counts(request, model)))
            await model.run(reply)
            assert len(await server.call("Encode", request)) <= reply.estimated_bytes
