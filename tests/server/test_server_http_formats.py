"""Fields of other servers that change what numbers mean are honoured or refused on OpenAI's and vLLM's routes."""

from typing import Any

import numpy as np
import pytest
from fake_server import StartServer
from http_calls import post

FIELDS = {"input": [[1, 7, 8, 2]], "add_special_tokens": False, "pooling": "mean"}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("embed_dtype", "float16"), ("endianness", "big"), ("modality", "image"), ("encoding_format", "bytes")],
)
async def test_formats_that_there_are_not(start_server: StartServer, path: str, field: str, value: str) -> None:
    server = await start_server(http_port=0)
    response = await post(server, path, {**FIELDS, "encoding_format": "base64", field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert repr(value) in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_activation_is_normalization(start_server: StartServer, path: str) -> None:
    server = await start_server(http_port=0)

    async def vector(**fields: Any) -> Any:
        (it,) = (await post(server, path, {**FIELDS, **fields})).json()["data"]
        return np.array(it.get("embedding", it.get("data")), np.float32)

    formats = {"embed_dtype": "float32", "endianness": "little", "modality": "text"}
    np.testing.assert_array_equal(await vector(use_activation=False, **formats), await vector(normalize=False))
    np.testing.assert_array_equal(await vector(use_activation=True), await vector(normalize=True))
    response = await post(server, path, {**FIELDS, "use_activation": True, "normalize": False})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "use_activation")
