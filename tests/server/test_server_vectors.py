"""Vectors as input, on a real gRPC server with a fake engine."""

from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import fake_rows
from fake_server import D_MODEL, Failed, FakeServer, StartServer, make_input

from encserve_proto.v1 import encoder_pb2 as pb


@pytest.fixture
async def server(start_server: StartServer) -> FakeServer:
    """A server whose model takes vectors."""
    return await start_server(takes_vectors=True)


def vectors(*ids: int, dtype: Any = np.float32) -> Any:
    """Vectors whose first component is what the fake engine takes for an id: (seq, d_model)."""
    numbers = np.zeros((len(ids), D_MODEL), dtype)
    numbers[:, 0] = ids
    return numbers


def embeddings(**fields: Any) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=[pb.Input(embeddings=pb.TokenEmbeddings(**fields))])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
async def test_each_sequence_gets_its_own_rows(server: FakeServer, dtype: Any) -> None:
    sent = [vectors(5, dtype=dtype), vectors(7, 8, 9, dtype=dtype)]
    response = await server.encode(*sent)
    rows = np.frombuffer(response.outputs[0].data, "<f4").reshape(-1, D_MODEL)
    assert list(response.outputs[0].lengths) == [1, 3]
    np.testing.assert_array_equal(rows, np.concatenate([fake_rows(it.astype(np.float32), D_MODEL) for it in sent]))
    assert [(info.token_count, list(info.token_ids)) for info in response.sequences] == [(1, []), (3, [])]


async def test_an_over_long_sequence_is_cut_where_allowed(server: FakeServer) -> None:
    response = await server.encode(vectors(*range(40)), options=pb.EncodeOptions(truncation=pb.TRUNCATION_END))
    (info,) = response.sequences
    assert (info.token_count, info.original_token_count, info.truncated) == (32, 40, True)


async def test_the_model_says_what_it_takes(server: FakeServer) -> None:
    info = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert (info.input_kind, info.vocab_size, info.has_tokenizer) == (pb.INPUT_KIND_EMBEDDINGS, 0, False)


NAN = vectors(1, 2, 3)
NAN[1, 3] = np.nan
BAD_REQUESTS = {
    "text": (pb.EncodeRequest(inputs=[make_input("hello")]), "inputs[0].text", "model tiny takes embeddings only"),
    "ids": (pb.EncodeRequest(inputs=[make_input([1])]), "inputs[0].token_ids", "model tiny takes embeddings only"),
    "no vectors": (embeddings(width=4), "inputs[0].embeddings", "must hold at least 1 vector; was empty"),
    "no width": (embeddings(data=bytes(16)), "inputs[0].embeddings.width", "must be at least 1; was 0"),
    "width": (embeddings(width=8, data=bytes(32)), "inputs[0].embeddings.width", "must be 4 .d_model of tiny.; was 8"),
    "rest": (embeddings(width=4, data=bytes(24)), "inputs[0].embeddings.data", "whole vectors of 4 x 4 bytes; was 24"),
    "data type": (
        embeddings(width=4, data=bytes(16), data_type=5),
        "inputs[0].embeddings.data_type",
        "must be a value of DataType, 0 to 4; was 5",
    ),
    "too long": (
        pb.EncodeRequest(inputs=[make_input(vectors(1)), make_input(vectors(*range(33)))]),
        "inputs[1].embeddings",
        "must be at most 32 tokens .*; was 33",
    ),
    "not finite": (
        pb.EncodeRequest(inputs=[make_input(NAN)]),
        "inputs[0].embeddings.data",
        "must be finite; was nan in row 1, column 3",
    ),
    "special tokens": (
        pb.EncodeRequest(inputs=[make_input(vectors(1))], options=pb.EncodeOptions(exclude_special_tokens=True)),
        "options.exclude_special_tokens",
        "does not say which tokens are special",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_vectors_are_named_by_field_index_and_numbers(server: FakeServer, name: str) -> None:
    bad, field, problem = BAD_REQUESTS[name]
    with pytest.raises(Failed, match=problem) as caught:
        await server.call("Encode", bad)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = caught.value.details["google.rpc.BadRequest"].field_violations
    assert violation.field == field
    assert server.engine.batches == []


async def test_a_sick_engine_is_probed_with_vectors(server: FakeServer) -> None:
    server.engine.broken = True
    for _ in range(3):
        with pytest.raises(Failed):
            await server.encode(vectors(1))
    model = server.app.catalog.resolve("", "")
    while not model.not_ready_reason():
        await server.app._clock.sleep(0.01)
    server.engine.broken = False
    while model.not_ready_reason():
        await server.app._clock.sleep(0.05)
    await server.encode(vectors(1))
