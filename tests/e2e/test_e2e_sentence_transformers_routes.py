"""What a directory says holds on every route and in every precision: vectors are sentence-transformers' own."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import least_cosine
from exporting import export_once
from real_server import cpu_has_bfloat16, real_server
from sentence_models import D_MODEL, LONGEST, text_of, write_model

from encserve_client import AsyncEncoderClient, EncoderClient
from encserve_export import Target, export_hf
from encserve_export.ground.precision import BOUNDS
from encserve_export.models import pretrained
from encserve_export.source.weights import read_weights

TEXTS = ["", "   ", "the cat", "🌍 東京 и Москва", *(text_of(n, seed=n) for n in (1, 17, 93, 95, 600))]
PROMPTS = {"query": "Query: ", "instruction": "Represent this passage: "}
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})


def dense(width: int, out: int, activation: str = TANH) -> tuple[str, dict[str, Any]]:
    return "Dense", {"in_features": width, "out_features": out, "bias": False, "activation_function": activation}


COMBINED: dict[str, Any] = {
    "encoder": {"config": {"intermediate_size": 64}},  # int8 leaves smaller products alone
    "modules": [
        ("Pooling", {"pooling_mode": ["weightedmean", "cls", "max"], "include_prompt": False}),
        dense(3 * D_MODEL, 32),
        ("LayerNorm", {"dimension": 32}),
        dense(32, 20, IDENTITY),
        NORMALIZE,
    ],
    "settings": {"prompts": PROMPTS, "default_prompt_name": "instruction", "truncate_dim": 16},
    "transformer": {"max_seq_length": 40, "do_lower_case": True},
}
LAST_TOKEN: dict[str, Any] = {
    "modules": [("Pooling", {"pooling_mode": "lasttoken"}), NORMALIZE],
    "settings": {"prompts": PROMPTS},
    "encoder": {
        "model_type": "qwen3",
        "config": {"num_key_value_heads": 1, "head_dim": 12, "pad_token_id": 0},
        "padding_side": "left",
    },
}
GEMMA: dict[str, Any] = {
    "modules": [
        ("Pooling", {"pooling_mode": "mean"}),
        dense(D_MODEL, 64, IDENTITY),
        dense(64, 24, IDENTITY),
        NORMALIZE,
    ],
    "settings": {"prompts": PROMPTS, "default_prompt_name": "query"},
    "transformer": {"max_seq_length": LONGEST},
    "encoder": {
        "model_type": "gemma3_text",
        "config": {
            "intermediate_size": 64,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "sliding_window": 8,
            "use_bidirectional_attention": True,
            "pad_token_id": 0,
        },
    },
}
T5: dict[str, Any] = {
    "modules": [("Pooling", {"pooling_mode": "mean"}), dense(D_MODEL, 16, IDENTITY), NORMALIZE],
    "transformer": {"max_seq_length": 50},
    "encoder": {"model_type": "t5", "config": {"d_model": D_MODEL, "d_kv": 12, "d_ff": 32, "num_layers": 2,
                                               "num_heads": 2, "pad_token_id": 0}},
}  # fmt: skip
# Each directory, and the ways it is exported.
DIRECTORIES = {"combined": COMBINED, "qwen3": LAST_TOKEN, "gemma": GEMMA, "t5": T5}
EXPORTS: dict[str, dict[str, Any]] = {
    **{f"combined.{via}": {"via": via} for via in ("own", "onnx", "transformers")},
    **{f"{name}.transformers": {} for name in ("qwen3", "gemma", "t5")},
    **{
        f"combined.{via}.{precision}": {"via": via, "precision": precision}
        for via in ("own", "onnx", "transformers")
        for precision in ("float16", "int8")
    },
    "gemma.transformers.float16": {"precision": "float16"},
    "gemma.transformers.int8": {"precision": "int8"},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("directories")
    made = {name: write_model(folder / name, **its) for name, its in DIRECTORIES.items()}
    directory = made["combined"]
    model = pretrained.load_model(directory, read_weights(directory))
    (directory / "onnx").mkdir()
    pretrained.write_onnx(model, "tracing", directory / "onnx" / "model.onnx")
    return made


@pytest.fixture(scope="module")
def models(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, options in EXPORTS.items():
        directory, via, *_ = name.split(".")
        target = Target(model_repository=models, name=name)
        exported = export_once(export_hf, directories[directory], target=target, **options)
        assert exported.manifest.source.route == via
        assert exported.manifest.parity.pipeline_texts >= 5
    return models


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[EncoderClient]:
    flags = [flag for name in EXPORTS for flag in ("--model", name)]
    with real_server(models, *flags) as server, EncoderClient(server.target) as client:
        yield client


@functools.cache
def theirs(directory: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu", local_files_only=True)


def check(got: Any, want: Any, name: str) -> None:
    """Each vector within 1e-4 of theirs; of a rounded bundle, within the cosine that its gate asks for."""
    assert got.shape == want.shape
    precision = name.rpartition(".")[2]
    if precision in ("float16", "int8"):
        norms = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
        assert ((got * want).sum(axis=1) / norms).min() >= (BOUNDS[precision].cosine or 0)
    else:
        assert (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max() <= 1e-4


@pytest.mark.parametrize("name", EXPORTS)
def test_vectors_are_those_of_sentence_transformers(
    name: str, directories: dict[str, Path], client: EncoderClient
) -> None:
    """Alone and together, with the default prompt and with each by its name."""
    model = theirs(directories[name.partition(".")[0]])
    want = model.encode(TEXTS, batch_size=1)
    check(client.embed(TEXTS, model=name, truncate=True), want, name)
    alone = [client.embed([text], model=name, truncate=True) for text in TEXTS]
    check(np.concatenate(alone), want, name)
    for prompt_name in model.prompts:
        got = client.embed(TEXTS, model=name, truncate=True, prompt_name=prompt_name)
        check(got, model.encode(TEXTS, prompt_name=prompt_name), name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_openvino_has_what_comes_after_pooling(precision: str, directories: dict[str, Path], models: Path) -> None:
    """In float32, whatever the rows are computed in."""
    if precision == "bfloat16" and not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16")
    want = theirs(directories["combined"]).encode(TEXTS, batch_size=1)
    names = ["combined.own", "combined.onnx", "combined.transformers"]
    flags = [flag for name in names for flag in ("--model", name)]
    with (
        real_server(models, "--engine", "openvino", "--precision", precision, *flags) as server,
        EncoderClient(server.target) as client,
    ):
        for name in names:
            got = client.embed(TEXTS, model=name, truncate=True)
            if precision == "float32":
                check(got, want, name)
            else:
                assert least_cosine([got], [want]) >= 0.999


async def test_the_asynchronous_client_too(directories: dict[str, Path], client: EncoderClient) -> None:
    want = theirs(directories["gemma"]).encode(TEXTS, prompt_name="instruction")
    async with AsyncEncoderClient(client._target) as other:
        got = await other.embed(TEXTS, model="gemma.transformers", truncate=True, prompt_name="instruction")
    check(got, want, "gemma.transformers")
