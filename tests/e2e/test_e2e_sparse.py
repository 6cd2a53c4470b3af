"""Sparse encoders and BGE-M3: what is served over gRPC is what their own code gives."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from exporting import export_once
from real_server import RealServer, real_server
from sparse_models import ACTIVE, sparse_text, write_bge_m3, write_splade, write_static_queries

from encserve_client import AsyncEncoderClient, EncoderClient, SparseVector, TruncationWarning
from encserve_client.options import TrainedKind
from encserve_export import Target, export_hf

Array = npt.NDArray[Any]
TEXTS = [sparse_text(n) for n in (0, 1, 2, 17, 38, 39, 40, 61, 62, 63, 130, 600)]
SPLADE: dict[str, dict[str, Any]] = {
    "max": {},
    "sum": {"pooling": "sum"},
    "log1p": {"activation": "log1p_relu"},
    "sum-log1p": {"pooling": "sum", "activation": "log1p_relu"},
    "roberta": {"kind": "roberta"},
    "distilbert": {"kind": "distilbert"},
    "few": {"max_active_dims": 50},
}
TASKS = ["query", "document"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("directories")
    made = {name: write_splade(folder / name, **its) for name, its in SPLADE.items()}
    static = {
        "static-queries": write_static_queries(folder / "static-queries"),
        "static-documents": write_static_queries(folder / "static-documents", documents=True),
    }
    return {**made, **static, "bge-m3": write_bge_m3(folder / "bge-m3")}


@pytest.fixture(scope="module")
def server(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    models = tmp_path_factory.mktemp("models")
    for name, directory in directories.items():
        export_once(export_hf, directory, target=Target(model_repository=models, name=name))
    flags = [flag for name in directories for flag in ("--model", name)]
    with real_server(models, *flags, "--http-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def target(server: RealServer) -> str:
    return server.target


@pytest.fixture(scope="module")
def client(target: str) -> Iterator[EncoderClient]:
    with EncoderClient(target) as client:
        yield client


def ask(client: EncoderClient, model: str, task: str, texts: Sequence[str], **options: Any) -> Any:
    """What encode_query or encode_document gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        return getattr(client, f"encode_{task}")(texts, model=model, **options)


def dense_of(vectors: Sequence[SparseVector], width: int) -> Array:
    """(texts, width), zeros included; and the places ascend."""
    for its in vectors:
        assert its.width == width
        assert (np.diff(its.indices.astype(int)) > 0).all()
    return np.stack([its.dense() for its in vectors])


def assert_weights(got: Array, want: Array) -> None:
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 1e-5 + 1e-4 * np.abs(want)).all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", [*SPLADE, "static-queries", "static-documents"])
def test_weights_are_those_of_sentence_transformers(
    name: str, task: str, directories: dict[str, Path], client: EncoderClient
) -> None:
    """Alone and together."""
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(directories[name]), device="cpu", local_files_only=True)
    encode = {"query": model.encode_query, "document": model.encode_document}[task]
    want = encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    assert_weights(dense_of(ask(client, name, task, TEXTS), want.shape[1]), want)
    for text, its in zip(TEXTS, want, strict=True):
        assert_weights(dense_of(ask(client, name, task, [text]), want.shape[1]), its[None])


async def test_asyncio_has_them_too(directories: dict[str, Path], target: str) -> None:
    from sentence_transformers import SparseEncoder

    model, texts = SparseEncoder(str(directories["max"]), device="cpu", local_files_only=True), TEXTS[:6]
    async with AsyncEncoderClient(target) as client:
        queries = await client.encode_query(texts, model="max")
        documents = await client.encode_document(texts, model="max")
    for got, encode in ((queries, model.encode_query), (documents, model.encode_document)):
        want = encode(texts, convert_to_sparse_tensor=False).numpy()
        assert_weights(dense_of(got, want.shape[1]), want)


@pytest.mark.parametrize("name", [*SPLADE, "static-queries", "static-documents", "bge-m3"])
def test_http_has_the_same_weights_to_the_bit(name: str, server: RealServer, client: EncoderClient) -> None:
    for task in TASKS:
        body = {"inputs": TEXTS, "model": name, "input_type": task}
        response = httpx.post(f"{server.url}/embed_sparse", json=body, trust_env=False, timeout=60)
        assert response.status_code == 200, response.text
        for told, its in zip(response.json(), ask(client, name, task, TEXTS, kind="sparse"), strict=True):
            assert [weight["index"] for weight in told] == its.indices.tolist()
            np.testing.assert_array_equal(np.array([it["value"] for it in told], np.float32), its.values)


def test_http_has_the_same_three_kinds_of_bge_m3(server: RealServer, client: EncoderClient) -> None:
    for task, kind in (("token_embed", "multi_vector"), ("embed", "model")):
        body = {"input": TEXTS, "model": "bge-m3", "task": task}
        response = httpx.post(f"{server.url}/pooling", json=body, trust_env=False, timeout=60)
        assert response.status_code == 200, response.text
        for told, its in zip(response.json()["data"], ask(client, "bge-m3", "document", TEXTS, kind=kind), strict=True):
            np.testing.assert_array_equal(np.array(told["data"], np.float32).reshape(told["shape"]), its)


def test_the_models_are_sparse_as_trained_ones(directories: dict[str, Path], client: EncoderClient) -> None:
    for name in SPLADE:
        active = np.mean([len(its.indices) for its in ask(client, name, "document", TEXTS[3:])])
        assert (active == 50) if name == "few" else (ACTIVE / 4 < active < ACTIVE * 3)


def test_bge_m3s_three_kinds_come_of_one_call(directories: dict[str, Path], client: EncoderClient) -> None:
    """As its authors' code computes them."""
    from transformers import AutoModel, AutoTokenizer

    directory = directories["bge-m3"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, add_pooling_layer=False).eval()
    linears = [torch.load(directory / f"{name}_linear.pt", weights_only=True) for name in ("colbert", "sparse")]
    kinds: list[TrainedKind] = ["model", "sparse", "multi_vector"]

    def one_call(texts: Sequence[str]) -> list[Any]:
        outputs = client.run(texts, model="bge-m3", outputs=kinds, truncate=True).outputs
        return [outputs[0].matrix(), outputs[1].sparse_vectors(), outputs[2].arrays()]

    answers = [one_call(TEXTS), *([ask(client, "bge-m3", task, TEXTS, kind=kind) for kind in kinds] for task in TASKS)]
    for i, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt", truncation=True)["input_ids"]  # (1, seq)
        with torch.no_grad():
            rows = model(input_ids=ids).last_hidden_state[0]  # (seq, d_model)
        want_dense = torch.nn.functional.normalize(rows[:1], dim=-1).numpy()
        projected = rows[1:] @ linears[0]["weight"].T + linears[0]["bias"]
        want_vectors = torch.nn.functional.normalize(projected, dim=-1).numpy()
        want_weights = np.zeros((1, 1000), np.float32)
        for token, weight in zip(
            ids[0].tolist(), (rows @ linears[1]["weight"].T + linears[1]["bias"]).relu(), strict=True
        ):
            if token not in {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 1}:
                want_weights[0, token] = max(want_weights[0, token], weight.item())
        alone, together = [its[0] for its in one_call([text])], [[its[i] for its in answer] for answer in answers]
        for dense, weights, vectors in (alone, *together):
            assert np.abs(dense - want_dense).max() <= 1e-4
            assert_weights(dense_of([weights], 1000), want_weights)
            assert vectors.shape == want_vectors.shape
            assert np.linalg.norm(vectors - want_vectors, axis=1).max(initial=0) <= 1e-4
