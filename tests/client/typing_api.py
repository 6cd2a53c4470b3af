"""Checks the types in the client's API. mypy must infer the types that this file asserts. No test runs the file."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

from encserve_client import (
    Array,
    AsyncEncoderClient,
    Classification,
    EncoderClient,
    EncodeResult,
    EncserveError,
    Input,
    InspectResult,
    ModelInfo,
    Output,
    OverloadedError,
    RetryPolicy,
    SequenceInfo,
    SparseVector,
    Tls,
    TokenEmbeddings,
)

ids: npt.NDArray[np.uint16] = np.array([1, 2], np.uint16)
vectors: npt.NDArray[np.float16] = np.zeros((2, 8), np.float16)
embeddings: TokenEmbeddings = vectors
one_input: Input = embeddings


def with_threads() -> None:
    """Check the types of the sync client."""
    tls = Tls(ca="ca.pem")
    with EncoderClient("host:1", tls=tls, retry=RetryPolicy(max_attempts=2), channel_arguments={"a": 1}) as client:
        assert_type(client, EncoderClient)
        assert_type(client.token_vectors(["a", [1, 2], (3,), ids]), list[Array])
        assert_type(client.token_vectors(text for text in "abc"), list[Array])
        assert_type(client.rank("a", ["b"], top_k=1), list[tuple[int, float]])
        assert_type(client.rank("a", np.zeros((2, 8), np.float32)), list[tuple[int, float]])
        assert_type(client.score([("a", "b")]), Array)
        assert_type(client.classify("a"), Classification)
        assert_type(client.classify(["a"], activation="none"), list[Classification])
        assert_type(client.token_vectors([vectors, np.zeros((2, 8)), one_input]), list[Array])
        inspected = client.inspect(vectors, attention=[0, 2], hidden_states=False, positions=True, dtype="float16")
        assert_type(inspected, InspectResult)
        assert_type(inspected.attention, Array | None)
        assert_type(inspected.hidden_state_layers, tuple[int, ...])
        assert_type(client.embed(["a"], pooling="mean", dtype="float16"), Array)
        result = client.run(["a"], outputs=["tokens", Output("cls", l2_normalize=True)])
        assert_type(result, EncodeResult)
        assert_type(result.outputs[0].arrays(), list[Array])
        assert_type(result.outputs[0].array(0), Array)
        assert_type(result.outputs[0].sparse_vector(0), SparseVector)
        assert_type(result.errors, Mapping[int, EncserveError])
        assert_type(result.sequences[0].offsets, npt.NDArray[np.int64] | None)
        assert_type(client.models(), list[ModelInfo])
        assert_type(client.model("m"), ModelInfo)
        results = client.stream(["a"], pooling="mean", max_in_flight=3)
        assert_type(results, Generator[tuple[int, Array | EncserveError], None, None])
        assert_type(client.stream(["a"], kind="tokens"), Generator[tuple[int, Array | EncserveError], None, None])
        weights = client.stream(["a"], kind="sparse", ordered=False)
        assert_type(weights, Generator[tuple[int, SparseVector | EncserveError], None, None])
        client.embed(["a"], pooling="sum")  # type: ignore[call-overload]
        assert_type(client.token_vectors("a"), Array)
        assert_type(client.embed("a", dtype="binary"), Array)
        assert_type(client.embed(["a"], kind="multi_vector"), list[Array])
        assert_type(client.embed("a", kind="multi_vector", task="query"), Array)
        assert_type(client.embed(["a"], kind="sparse"), list[SparseVector])
        assert_type(client.embed("a", kind="sparse"), SparseVector)
        assert_type(client.embed(["a"], dtype="int8"), Array)
        assert_type(client.embed_spans("a text", [(0, 1), (2, 6)], pooling="max"), Array)
        assert_type(client.tokenize("a"), SequenceInfo)
        assert_type(client.tokenize(["a"], truncate=True), list[SequenceInfo])
        client.token_vectors([1.5])  # type: ignore[list-item]
        client.inspect(["a", "b"])  # type: ignore[list-item]
        client.inspect("a", attention=1.5)  # type: ignore[arg-type]
        client.stream(["a"], max_in_fligth=3)  # type: ignore[call-overload]


async def with_asyncio() -> None:
    """Check the types of the async client."""

    async def texts() -> AsyncIterator[str]:
        yield "a"

    async with AsyncEncoderClient() as client:
        assert_type(await client.token_vectors(["a"]), list[Array])
        assert_type(await client.embed(["a"]), Array)
        assert_type(await client.run(["a"]), EncodeResult)
        assert_type(await client.inspect("a", attention=range(2)), InspectResult)
        assert_type(client.stream(texts()), AsyncGenerator[tuple[int, Array | EncserveError], None])
        async for index, rows in client.stream(texts(), kind="tokens", ordered=False):
            assert_type(index, int)
            assert_type(rows, Array | EncserveError)


def handle(error: Exception) -> Any:
    """Check the types of an error's attributes."""
    if isinstance(error, OverloadedError):
        assert_type(error.retry_delay_seconds, float | None)
        assert_type(error.attempts, int)
    return asyncio.run(with_asyncio())
