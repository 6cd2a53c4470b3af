"""Tests of vectors as input over gRPC."""

from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import fake_rows
from fake_server import D_MODEL, FakeServer, StartServer, make_input, refusal, rows_of
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb

SHARED_SETTINGS = {"takes_vectors": True}


def vectors(*ids: int, dtype: Any = np.float32) -> Any:
    """Return (seq, d_model) vectors. The fake engine uses the first number of a vector as a token id."""
    numbers = np.zeros((len(ids), D_MODEL), dtype)
    numbers[:, 0] = ids
    return numbers


def embeddings(**fields: Any) -> pb.EncodeRequest:
    return pb.EncodeRequest(inputs=[pb.Input(embeddings=pb.TokenEmbeddings(**fields))])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
async def test_each_sequence_gets_its_own_rows(shared: FakeServer, dtype: Any) -> None:
    sent = [vectors(5, dtype=dtype), vectors(7, 8, 9, dtype=dtype)]
    response = await shared.encode(*sent)
    for rows, it in zip(rows_of(response), sent, strict=True):
        np.testing.assert_array_equal(rows, fake_rows(it.astype(np.float32), D_MODEL))
    assert [(info.token_count, list(info.token_ids)) for info in response.sequences] == [(1, []), (3, [])]


async def test_a_long_sequence_is_cut_if_the_call_allows_it(shared: FakeServer) -> None:
    response = await shared.encode(vectors(*range(40)), options=pb.EncodeOptions(truncation=pb.TRUNCATION_END))
    (info,) = response.sequences
    assert (info.token_count, info.original_token_count, info.truncated) == (32, 40, True)
    model = pb.GetModelResponse.FromString(await shared.call("GetModel", pb.GetModelRequest())).model
    assert (model.input_kind, model.vocab_size, model.has_tokenizer) == (pb.INPUT_KIND_EMBEDDINGS, 0, False)


NAN = vectors(1, 2, 3)
NAN[1, 3] = np.nan
# Each row has a request, the field that the error names, and a part of the message.
BAD_REQUESTS: list[tuple[pb.EncodeRequest, str, str]] = [
    (pb.EncodeRequest(inputs=[make_input("hello")]), "inputs[0].text", "embeddings only"),
    (pb.EncodeRequest(inputs=[make_input([1])]), "inputs[0].token_ids", "embeddings only"),
    (embeddings(width=4), "inputs[0].embeddings", "at least 1 vector"),
    (embeddings(data=bytes(16)), "inputs[0].embeddings.width", "was 0"),
    (embeddings(width=8, data=bytes(32)), "inputs[0].embeddings.width", "must be 4 (d_model of tiny); was 8"),
    (
        embeddings(width=4, data=bytes(24)),
        "inputs[0].embeddings.data",
        "4 x 4 bytes; was 24",
    ),
    (embeddings(width=4, data=bytes(16), data_type=5), "inputs[0].embeddings.data_type", "0 to 4; was 5"),
    *(
        (
            embeddings(width=4, data=bytes(16), data_type=it),
            "inputs[0].embeddings.data_type",
            f"{it} is only for output",
        )
        for it in ("DATA_TYPE_BINARY", "DATA_TYPE_INT8")
    ),
    (
        pb.EncodeRequest(inputs=[make_input(vectors(1)), make_input(vectors(*range(33)))]),
        "inputs[1].embeddings",
        "at most 32 tokens",
    ),
    (pb.EncodeRequest(inputs=[make_input(NAN)]), "inputs[0].embeddings.data", "nan in row 1, column 3"),
    (
        pb.EncodeRequest(inputs=[make_input(vectors(1))], options=pb.EncodeOptions(exclude_special_tokens=True)),
        "options.exclude_special_tokens",
        "special",
    ),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD_REQUESTS)
async def test_bad_vectors_are_named_by_field_index_and_numbers(
    shared: FakeServer, bad: pb.EncodeRequest, field: str, problem: str
) -> None:
    batches = list(shared.engine.batches)
    failed = await refusal(shared.call("Encode", bad))
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = failed.details["google.rpc.BadRequest"].field_violations
    assert violation.field == field
    assert problem in failed.text
    assert shared.engine.batches == batches


@pytest.mark.system  # takes more than a second
async def test_an_unhealthy_engine_is_probed_with_vectors(start_server: StartServer) -> None:
    server = await start_server(takes_vectors=True)
    server.engine.broken = True
    for _ in range(3):
        await refusal(server.encode(vectors(1)))
    model = server.app.catalog.resolve("", "")
    await until(model.not_ready_reason)
    server.engine.broken = False
    await until(lambda: not model.not_ready_reason())
    await server.encode(vectors(1))
