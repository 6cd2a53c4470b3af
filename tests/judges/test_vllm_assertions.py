"""The requests of vLLM's and infinity's own tests, with what those tests assert, sent to a server with MiniLM.

vLLM: tests/entrypoints/pooling, of /v1/embeddings, /v2/embed, /pooling and of cutting. infinity:
libs/infinity_emb/tests/end_to_end. What they assert and does not hold here is below DIFFERENT, which docs/http.md lists
with the reasons.

vLLM is licensed under the Apache License 2.0, infinity under the MIT License. No code of theirs is here: the tests are
written anew, with other texts and another model, after what theirs ask for and assert.
"""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import MODEL, export_minilm
from judging import ROOT
from real_server import RealServer, real_server

from encserve_client import EncoderClient

Array = npt.NDArray[Any]
WIDTH, LONGEST = 384, 256
TEXT = "An encoder turns a sentence into a list of numbers that says what it means"
PORTUGUESE = "Quantas estações de comboio há entre Lisboa e o Porto, e quais têm biblioteca?"
LONG = " ".join(["river"] * 2000)
MESSAGES = [{"role": "user", "content": "Which trains stop in Coimbra?"}]
# What their tests do, the first column of the table in docs/http.md: requests, and their status and words here.
DIFFERENT: dict[str, list[tuple[str, dict[str, Any], int, str]]] = {
    "`prompt` of `/tokenize`": [("/tokenize", {"prompt": TEXT}, 422, "inputs: ")],
    "`messages`": [(path, {"messages": MESSAGES}, 400, "input: ") for path in ("/v1/embeddings", "/pooling")],
    "`/invocations`": [("/invocations", {"input": TEXT}, 404, "/invocations")],
    "`encoding_format` `bytes` and `bytes_only`": [
        (
            path,
            {"input": TEXT, "encoding_format": name},
            400,
            f"encoding_format: must be one of float, base64; was '{name}'",
        )
        for path in ("/v1/embeddings", "/pooling")
        for name in ("bytes", "bytes_only")
    ],
    "`embed_dtype` other than `float32`, `endianness` `big`": [
        (path, {"input": TEXT, "encoding_format": "base64", field: value}, 400, f"{field}: ")
        for path in ("/v1/embeddings", "/pooling")
        for field, value in (("embed_dtype", "float16"), ("endianness", "big"))
    ],
    "`dimensions` of a model that was not trained for them": [
        ("/v1/embeddings", {"input": TEXT, "dimensions": 16}, 200, '"embedding"')
    ],
    "ids without special tokens": [("/v1/embeddings", {"input": [2023, 2003]}, 400, "input[0]: ")],
    "texts of several times the longest input": [("/v1/embeddings", {"input": LONG}, 200, f'"total_tokens":{LONGEST}')],
    "the tasks `classify`, `token_classify` and `plugin`": [
        ("/pooling", {"input": TEXT, "task": task}, 400, f"task: must be one of token_embed, embed; was '{task}'")
        for task in ("classify", "token_classify", "plugin")
    ],
    "`truncate` `START`": [("/v2/embed", {"texts": [LONG], "truncate": "START"}, 400, "truncate: ")],
    "`/embeddings` and `/models` without `/v1`": [
        (path, {"input": TEXT}, 404, f"there is nothing at {path}") for path in ("/embeddings", "/models")
    ],
    "`modality` other than `text`": [
        ("/v1/embeddings", {"input": TEXT, "modality": modality}, 400, "modality: ") for modality in ("image", "audio")
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    models = tmp_path_factory.mktemp("models")
    export_minilm(models)
    with real_server(models, "--model", MODEL, "--http-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def encoder(server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def ids(http: httpx.Client) -> list[int]:
    """TEXT's, special tokens included."""
    return [token["id"] for token in http.post("/tokenize", json={"inputs": TEXT}).json()[0]]


def ask(http: httpx.Client, path: str, **fields: Any) -> Any:
    response = http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def vectors_of(answer: Any) -> Array:
    return np.array([it["embedding"] for it in answer["data"]], np.float32)


def decoded(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), "<f4")


def embed(http: httpx.Client, texts: list[str], **fields: Any) -> Any:
    """Cohere's route."""
    return ask(http, "/v2/embed", texts=texts, **{"embedding_types": ["float"], **fields})


# What vLLM asserts of /v1/embeddings


def test_models_are_listed(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize("count", [None, 10])
@pytest.mark.parametrize("as_ids", [False, True])
def test_completion_request(
    http: httpx.Client, encoder: EncoderClient, ids: list[int], as_ids: bool, count: int | None
) -> None:
    one: Any = ids if as_ids else TEXT
    answer = ask(http, "/v1/embeddings", input=one if count is None else [one] * count, encoding_format="float")
    assert len(answer["data"]) == (count or 1)
    assert [it["index"] for it in answer["data"]] == list(range(count or 1))
    assert {it["object"] for it in answer["data"]} == {"embedding"}
    assert len(answer["data"][0]["embedding"]) == WIDTH
    assert answer["usage"].get("completion_tokens", 0) == 0
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == len(ids) * (count or 1)
    np.testing.assert_array_equal(vectors_of(answer), encoder.embed([TEXT] * (count or 1), l2_normalize=True))


def test_base64_embedding(http: httpx.Client) -> None:
    texts = ["Trains leave every hour", TEXT]
    floats = vectors_of(ask(http, "/v1/embeddings", input=texts, encoding_format="float"))
    encoded = ask(http, "/v1/embeddings", input=texts, encoding_format="base64")
    np.testing.assert_array_equal([decoded(it["embedding"]) for it in encoded["data"]], floats)
    np.testing.assert_array_equal(vectors_of(ask(http, "/v1/embeddings", input=texts)), floats)


@pytest.mark.parametrize("endianness", ["native", "little"])
def test_base64_of_the_dtype_and_byte_order_that_there_are(http: httpx.Client, endianness: str) -> None:
    how = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": endianness}
    (it,) = ask(http, "/v1/embeddings", input=TEXT, **how)["data"]
    floats = vectors_of(ask(http, "/v1/embeddings", input=TEXT, encoding_format="float"))
    np.testing.assert_array_equal(decoded(it["embedding"]), floats[0])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("field", ["encoding_format", "embed_dtype", "endianness"])
def test_params_not_supported(http: httpx.Client, path: str, field: str) -> None:
    fields = {"model": MODEL, "input": TEXT, "encoding_format": "base64", field: f"bad_{field}"}
    response = http.post(path, json=fields)
    assert response.status_code == 400
    assert f"bad_{field}" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_use_activation(http: httpx.Client, path: str) -> None:
    def vector(**fields: Any) -> Array:
        (it,) = ask(http, path, input=TEXT, encoding_format="float", pooling="mean", **fields)["data"]
        return np.array(it["embedding" if path == "/v1/embeddings" else "data"], np.float32)

    default, scaled, plain = vector(use_activation=None), vector(use_activation=True), vector(use_activation=False)
    np.testing.assert_array_equal(default, scaled)
    assert not np.allclose(plain, scaled, atol=1e-2)
    np.testing.assert_allclose(plain / np.linalg.norm(plain), scaled, atol=1e-6)


# ... of cutting


@pytest.mark.parametrize("as_ids", [False, True])
def test_smaller_truncation_size(http: httpx.Client, ids: list[int], as_ids: bool) -> None:
    given: Any = ids if as_ids else PORTUGUESE
    answer = ask(http, "/v1/embeddings", input=given, truncate_prompt_tokens=10)
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert len(answer["data"][0]["embedding"]) == WIDTH


def test_max_truncation_size(http: httpx.Client) -> None:
    answer = ask(http, "/v1/embeddings", input=LONG, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == LONGEST


@pytest.mark.parametrize("size", [LONGEST + 1, 8193])
def test_bigger_truncation_size(http: httpx.Client, size: int) -> None:
    response = http.post("/v1/embeddings", json={"input": LONG, "truncate_prompt_tokens": size})
    assert response.status_code == 400
    assert f"truncate_prompt_tokens: must be from 1 to {LONGEST}" in response.json()["error"]["message"]


# ... of dimensions and long texts


@pytest.mark.parametrize("dimensions", [None, 256])
def test_matryoshka(http: httpx.Client, dimensions: int | None) -> None:
    texts = ["The last train leaves at midnight."] * 3
    answer = ask(http, "/v1/embeddings", input=texts, encoding_format="float", dimensions=dimensions)
    assert vectors_of(answer).shape == (3, dimensions or WIDTH)
    assert answer["usage"]["prompt_tokens"] > 0


def test_negative_dimensions(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": TEXT, "dimensions": -1}).status_code == 400


def test_batch_long_text(http: httpx.Client) -> None:
    answer = ask(http, "/v1/embeddings", input=[LONG, LONG * 2, "A short one."], encoding_format="float")
    assert [it["index"] for it in answer["data"]] == [0, 1, 2]
    vectors = vectors_of(answer)
    assert vectors.shape == (3, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"]


# ... of /pooling


def test_pooling_token_embed(http: httpx.Client, ids: list[int]) -> None:
    answer = ask(http, "/pooling", input=TEXT, encoding_format="float", task="token_embed")
    assert answer["object"] == "list"
    assert len(answer["data"]) == 1
    assert np.array(answer["data"][0]["data"]).shape == (len(ids), WIDTH)


def test_pooling_embed(http: httpx.Client) -> None:
    answer = ask(http, "/pooling", input=TEXT, encoding_format="float", task="embed")
    assert np.array(answer["data"][0]["data"]).shape == (WIDTH,)


@pytest.mark.parametrize("as_ids", [False, True])
def test_pooling_completion_request(http: httpx.Client, ids: list[int], as_ids: bool) -> None:
    one: Any = ids if as_ids else TEXT
    for given, count in ((one, 1), ([one] * 10, 10)):
        answer = ask(http, "/pooling", input=given, encoding_format="float", task="token_embed")
        assert answer["id"] is not None
        assert [len(it["data"]) for it in answer["data"]] == [len(ids)] * count
        assert answer["usage"].get("completion_tokens", 0) == 0
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == len(ids) * count


def test_batch_base64_pooling(http: httpx.Client) -> None:
    texts = ["Trains leave every hour", TEXT]
    floats = ask(http, "/pooling", input=texts, encoding_format="float", task="token_embed")["data"]
    default = ask(http, "/pooling", input=texts, task="token_embed")["data"]
    encoded = ask(http, "/pooling", input=texts, encoding_format="base64", task="token_embed")["data"]
    for one, other, text in zip(floats, default, encoded, strict=True):
        rows = np.array(one["data"], np.float32)
        np.testing.assert_array_equal(rows, np.array(other["data"], np.float32))
        np.testing.assert_array_equal(rows, decoded(text["data"]).reshape(-1, WIDTH))


@pytest.mark.parametrize("task", ["classify", "token_classify", "plugin"])
def test_pooling_not_supported(http: httpx.Client, task: str) -> None:
    response = http.post("/pooling", json={"model": MODEL, "input": "test", "encoding_format": "float", "task": task})
    assert response.status_code == 400
    assert repr(task) in response.json()["error"]["message"]


# ... of /v2/embed


def test_cohere_response_structure(http: httpx.Client) -> None:
    answer = embed(http, ["test"])
    assert "id" in answer
    assert answer["texts"] == ["test"]
    assert answer["meta"]["api_version"]["version"] == "2"
    assert answer["meta"]["tokens"]["input_tokens"] > 0
    assert np.array(answer["embeddings"]["float"]).shape == (1, WIDTH)
    assert abs(float(np.linalg.norm(answer["embeddings"]["float"][0])) - 1) < 0.01


@pytest.mark.parametrize("texts", [["a timetable of all the trains"], ["a railway station", "a train", "an orange"]])
def test_cohere_parity(http: httpx.Client, texts: list[str]) -> None:
    second, first = embed(http, texts), ask(http, "/v1/embeddings", input=texts, encoding_format="float")
    np.testing.assert_array_equal(np.array(second["embeddings"]["float"], np.float32), vectors_of(first))
    assert second["meta"]["billed_units"]["input_tokens"] == first["usage"]["prompt_tokens"]


def test_cohere_embedding_types(http: httpx.Client) -> None:
    made = embed(http, ["test"], embedding_types=["float", "binary", "ubinary", "base64"])["embeddings"]
    assert len(made["binary"][0]) == len(made["ubinary"][0]) == len(made["float"][0]) // 8
    np.testing.assert_array_equal(decoded(made["base64"][0]), np.array(made["float"][0], np.float32))


def test_cohere_semantic_similarity(http: httpx.Client) -> None:
    made = np.array(
        embed(http, ["a railway station", "where trains stop", "how to peel an orange"])["embeddings"]["float"]
    )
    assert made[0] @ made[1] > made[0] @ made[2]


def test_cohere_input_type(http: httpx.Client) -> None:
    """One that is not known is refused; one that is left out is not."""
    response = http.post("/v2/embed", json={"model": MODEL, "texts": ["a train"], "input_type": "search_song"})
    assert response.status_code == 400
    assert "input_type" in response.json()["message"]
    assert len(embed(http, ["a train"])["embeddings"]["float"]) == 1


def test_cohere_missing_input(http: httpx.Client) -> None:
    assert http.post("/v2/embed", json={"model": MODEL}).status_code == 400


def test_cohere_truncation(http: httpx.Client) -> None:
    assert len(embed(http, [LONG], truncate="END")["embeddings"]["float"]) == 1
    assert http.post("/v2/embed", json={"model": MODEL, "texts": [LONG], "truncate": "NONE"}).status_code == 400


# What infinity asserts


@pytest.mark.parametrize("texts", [["The bridge is closed."], ["The bridge is closed.", "Take the ferry."]])
@pytest.mark.parametrize("dimensions", [None, 10])
def test_infinity_embedding(
    http: httpx.Client, encoder: EncoderClient, texts: list[str], dimensions: int | None
) -> None:
    answer = ask(http, "/v1/embeddings", input=texts, dimensions=dimensions)
    assert answer["model"] == MODEL
    want = encoder.embed(texts, l2_normalize=True, dimensions=dimensions)
    np.testing.assert_array_equal(vectors_of(answer), want)


def test_infinity_health(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200


def test_infinity_modality(http: httpx.Client) -> None:
    answer = ask(http, "/v1/embeddings", input=["a ferry", "a ferry", "an orange"], modality="text")
    first, second, third = vectors_of(answer)
    np.testing.assert_array_equal(first, second)
    assert first @ second > first @ third


# What is different


@pytest.mark.parametrize("what", DIFFERENT)
def test_different(http: httpx.Client, what: str) -> None:
    for path, body, status, text in DIFFERENT[what]:
        response = http.post(path, json=body)
        assert response.status_code == status, body
        assert text in response.text


def test_the_page_lists_what_is_different() -> None:
    page = (ROOT / "docs/http.md").read_text()
    section = page.partition("\n## Differences\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == list(DIFFERENT)
