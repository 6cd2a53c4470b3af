"""Tests requests to which our server replies differently from vLLM or infinity.

The requests come from the tests of vLLM and infinity. docs/reference/http.md lists the differences.
The tests in tests/server/test_server_http*.py send the requests to which all three servers reply in the same way.
"""

from typing import Any

import httpx
import pytest
from docs_text import first_cells
from judging import ROOT
from real_server import RealServer

LONGEST = 256  # the token limit of all-MiniLM-L6-v2
TEXT = "An encoder turns a sentence into a list of numbers"
LONG_TEXT = " ".join(["river"] * 2000)
MESSAGES = [{"role": "user", "content": "Which trains stop in Coimbra?"}]
VECTOR_ROUTES = ("/v1/embeddings", "/pooling")
Case = tuple[str, dict[str, Any], int, str]
# For each row of the table "Differences" in docs/reference/http.md: the text of the first column, and the cases. A case
# is the route, the body, the expected status, and a part of the expected reply.
DIFFERENCES: dict[str, list[Case]] = {
    "`prompt` of `/tokenize`": [("/tokenize", {"prompt": TEXT}, 422, "inputs: ")],
    "`messages`": [(path, {"messages": MESSAGES}, 400, "input: ") for path in VECTOR_ROUTES],
    "`/invocations`": [("/invocations", {"input": TEXT}, 404, "/invocations")],
    "`encoding_format` `bytes` and `bytes_only`": [
        (
            path,
            {"input": TEXT, "encoding_format": name},
            400,
            f"encoding_format: must be one of float, base64; was '{name}'",
        )
        for path in VECTOR_ROUTES
        for name in ("bytes", "bytes_only")
    ],
    "`embed_dtype` other than `float32`, `endianness` `big`": [
        (path, {"input": TEXT, "encoding_format": "base64", field: value}, 400, f"{field}: ")
        for path in VECTOR_ROUTES
        for field, value in (("embed_dtype", "float16"), ("endianness", "big"))
    ],
    "`dimensions` of a model that was not trained for them": [
        ("/v1/embeddings", {"input": TEXT, "dimensions": 16}, 200, '"embedding"')
    ],
    "ids without special tokens": [("/v1/embeddings", {"input": [2023, 2003]}, 400, "input[0]: ")],
    "texts of several times the longest input": [
        ("/v1/embeddings", {"input": LONG_TEXT}, 200, f'"total_tokens":{LONGEST}')
    ],
    "the tasks `classify`, `token_classify` and `plugin`": [
        ("/pooling", {"input": TEXT, "task": task}, 400, f"task: must be one of token_embed, embed; was '{task}'")
        for task in ("classify", "token_classify", "plugin")
    ],
    "`data_1`, `data_2` and `items` of `/score`": [
        ("/score", {"data_1": TEXT, "data_2": TEXT}, 400, "text_1: is required"),
        ("/score", {"queries": TEXT, "items": TEXT}, 400, "documents: is required"),
    ],
    "`document` of a rank as a string": [
        ("/v1/rerank", {"query": TEXT, "documents": [TEXT]}, 200, '"document":{"text":'),
        ("/v1/rerank", {"query": TEXT, "documents": [TEXT], "return_documents": False}, 200, '"results":[{"index":0'),
    ],
    "`truncate` `START`": [("/v2/embed", {"texts": [LONG_TEXT], "truncate": "START"}, 400, "truncate: ")],
    "`/embeddings` and `/models` without `/v1`": [
        (path, {"input": TEXT}, 404, path) for path in ("/embeddings", "/models")
    ],
    "`modality` other than `text`": [
        ("/v1/embeddings", {"input": TEXT, "modality": modality}, 400, "modality: ") for modality in ("image", "audio")
    ],
}


@pytest.mark.parametrize("cases", DIFFERENCES.values(), ids=DIFFERENCES)
def test_the_replies_are_as_documented(minilm: RealServer, cases: list[Case]) -> None:
    for path, body, status, text in cases:
        reply = httpx.post(f"{minilm.url}{path}", json=body, trust_env=False, timeout=60)
        assert reply.status_code == status, body
        assert text in reply.text


def test_the_table_in_the_docs_has_these_rows() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    assert first_cells(page, "Differences") == list(DIFFERENCES)
