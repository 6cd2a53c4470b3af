"""Sparse encoders and BGE-M3: what is served over gRPC is what their own code gives."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch
from exporting import export_once
from real_server import real_server
from sparse_models import ACTIVE, sparse_text, write_bge_m3, write_splade, write_static_queries

from encserve_export import Target, export_hf
from encserve_proto.v1 import encoder_pb2, encoder_pb2_grpc

pytest.importorskip("sentence_transformers", reason="needs encserve-export[sentence-transformers]")
pytestmark = pytest.mark.models

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
TASKS = {"query": encoder_pb2.TASK_QUERY, "document": encoder_pb2.TASK_DOCUMENT}
SPARSE = encoder_pb2.OUTPUT_KIND_SPARSE


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
def stub(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    for name, directory in directories.items():
        export_once(export_hf, directory, target=Target(model_repository=models, name=name))
    flags = [flag for name in directories for flag in ("--model", name)]
    with real_server(models, *flags) as server, grpc.insecure_channel(server.target) as channel:
        yield encoder_pb2_grpc.EncoderServiceStub(channel)


def ask(stub: Any, model: str, texts: Sequence[str], *kinds: int, task: int = 0) -> Any:
    options = encoder_pb2.EncodeOptions(
        outputs=[encoder_pb2.OutputSpec(kind=kind) for kind in kinds],  # type: ignore[arg-type]
        truncation=encoder_pb2.TRUNCATION_END,
        task=task,  # type: ignore[arg-type]
    )
    inputs = [encoder_pb2.Input(text=text) for text in texts]
    return stub.Encode(encoder_pb2.EncodeRequest(model=model, inputs=inputs, options=options), timeout=120)


def dense_of(tensor: Any, width: int) -> Array:
    """(texts, width), zeros included; and the places ascend."""
    values, indices = np.frombuffer(tensor.data, "<f4"), np.frombuffer(tensor.indices, "<u4")
    vectors, start = np.zeros((len(tensor.lengths), width), np.float32), 0
    for vector, length in zip(vectors, tensor.lengths, strict=True):
        places = indices[start : start + length]
        assert (np.diff(places.astype(int)) > 0).all()
        vector[places] = values[start : start + length]
        start += length
    return vectors


def assert_weights(got: Array, want: Array) -> None:
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 1e-5 + 1e-4 * np.abs(want)).all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", [*SPLADE, "static-queries", "static-documents"])
def test_weights_are_those_of_sentence_transformers(
    name: str, task: str, directories: dict[str, Path], stub: Any
) -> None:
    """Alone and together."""
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(directories[name]), device="cpu", local_files_only=True)
    encode = {"query": model.encode_query, "document": model.encode_document}[task]
    want = encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    assert_weights(dense_of(ask(stub, name, TEXTS, SPARSE, task=TASKS[task]).outputs[0], want.shape[1]), want)
    for text, its in zip(TEXTS, want, strict=True):
        alone = ask(stub, name, [text], SPARSE, task=TASKS[task]).outputs[0]
        assert_weights(dense_of(alone, want.shape[1]), its[None])


def test_the_models_are_sparse_as_trained_ones(directories: dict[str, Path], stub: Any) -> None:
    for name in SPLADE:
        active = np.mean(ask(stub, name, TEXTS[3:], SPARSE, task=encoder_pb2.TASK_DOCUMENT).outputs[0].lengths)
        assert (active == 50) if name == "few" else (ACTIVE / 4 < active < ACTIVE * 3)


def test_bge_m3s_three_kinds_come_of_one_call(directories: dict[str, Path], stub: Any) -> None:
    """As its authors' code computes them."""
    from transformers import AutoModel, AutoTokenizer

    directory = directories["bge-m3"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, add_pooling_layer=False).eval()
    linears = [torch.load(directory / f"{name}_linear.pt", weights_only=True) for name in ("colbert", "sparse")]
    kinds = (encoder_pb2.OUTPUT_KIND_MODEL_POOLING, SPARSE, encoder_pb2.OUTPUT_KIND_MULTI_VECTOR)
    together = ask(stub, "bge-m3", TEXTS, *kinds)
    answers = [ask(stub, "bge-m3", [text], *kinds).outputs for text in TEXTS]
    dense = np.frombuffer(together.outputs[0].data, "<f4").reshape(len(TEXTS), -1)
    weights = dense_of(together.outputs[1], 1000)
    ends = np.cumsum(together.outputs[2].lengths)
    vectors = np.split(np.frombuffer(together.outputs[2].data, "<f4").reshape(ends[-1], -1), ends[:-1])
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
        alone = answers[i]
        for got in (dense[i : i + 1], np.frombuffer(alone[0].data, "<f4")[None]):
            assert np.abs(got - want_dense).max() <= 1e-4
        for got in (weights[i : i + 1], dense_of(alone[1], 1000)):
            assert_weights(got, want_weights)
        for got in (vectors[i], np.frombuffer(alone[2].data, "<f4").reshape(-1, want_vectors.shape[1])):
            assert got.shape == want_vectors.shape
            assert np.linalg.norm(got - want_vectors, axis=1).max(initial=0) <= 1e-4
