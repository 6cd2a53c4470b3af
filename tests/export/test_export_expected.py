"""The user may give the exporter a file with hidden states from the original module.

If the bundle's hidden states differ from the hidden states in the file, the export fails.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import DATA, golden_cases
from click.testing import CliRunner, Result
from onnx_files import build, save
from safetensors.torch import load_file, save_file
from torch import nn

from encserve_export import OnnxOptions, Target, export_checkpoint, export_hf, export_onnx
from encserve_export.check.expected import read_expected
from encserve_export.cli import main
from encserve_export.core.errors import ExpectedFileError, ExpectedRowsError
from encserve_export.core.precision import Precision

RIGHT = {"n_heads": 4, "activation": "gelu", "norm": "pre", "scale_embedding": False, "position": "none"}
WRONG = RIGHT | {"activation": "relu", "norm": "post"}
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
ARRAYS = {
    "input_ids": np.array([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]]),
    "attention_mask": MASK,
    "rows": np.ones((2, 5, 8), np.float32),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the state dict of a user's module and this module's hidden states into a folder. Return the folder."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    table = nn.Embedding(40, 32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", norm_first=True, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    module = nn.ModuleDict({"embedding": table, "encoder": encoder})
    save_file(module.state_dict(), folder / "weights.safetensors")
    ids, mask = torch.from_numpy(ARRAYS["input_ids"]), torch.from_numpy(MASK)
    with torch.no_grad():
        rows = encoder(table(ids), src_key_padding_mask=mask == 0)
        halved = encoder.half()(table.half()(ids), src_key_padding_mask=mask == 0).float()
    write(folder / "rows.npz", rows=rows.numpy())
    write(folder / "halved.npz", rows=halved.numpy())
    (folder / "right.json").write_text(json.dumps(RIGHT))
    (folder / "wrong.json").write_text(json.dumps(WRONG))
    return folder


def write(path: Path, **changed: Any) -> Path:
    """Write a file of expected hidden states. `changed` has new values of arrays; None removes an array."""
    arrays = {name: array for name, array in (ARRAYS | changed).items() if array is not None}
    if path.suffix == ".safetensors":
        save_file({name: torch.as_tensor(array) for name, array in arrays.items()}, path)
    else:
        np.savez(path, **arrays)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_wrong_description_is_refused(trained: Path, models: Path) -> None:
    arguments = (
        "checkpoint",
        trained / "weights.safetensors",
        "--model-repository",
        models,
        "--max-sequence-tokens",
        16,
    )
    expect = ("--expect", trained / "rows.npz")
    wrong = run(*arguments, "--name", "wrong", "--config", trained / "wrong.json", *expect)
    assert wrong.exit_code == 1
    error = wrong.stderr.splitlines()[-1]
    assert f"the bundle does not give the rows of {trained / 'rows.npz'}: a row has the relative error" in error
    assert "; at most 5.0e-05 is allowed. The largest error is in rows[" in error
    assert "The description of the model (norm, activation, positions, merge_heads, ...) differs" in error
    assert not models.exists()
    right = run(*arguments, "--name", "right", "--config", trained / "right.json", *expect)
    assert right.exit_code == 0, right.output
    assert "expected     7 rows compared with rows.npz, max error " in right.stdout
    parity = json.loads((models / "right" / "1" / "manifest.json").read_text())["parity"]
    assert parity["expected_rows"] == 7
    assert 0 < parity["max_expected_error"] <= 5e-5


def test_the_error_names_half_precision(trained: Path, models: Path) -> None:
    with pytest.raises(ExpectedRowsError, match=r"Half precision or TF32 .*allow_tf32 = False"):
        export(trained, models, expect=trained / "halved.npz")


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_lower_precisions_are_compared_by_cosine(trained: Path, models: Path, precision: Precision) -> None:
    exported = export(trained, models, expect=trained / "rows.npz", precision=precision)
    assert 0.99 <= exported.manifest.parity.min_expected_cosine < 1
    with pytest.raises(ExpectedRowsError, match=r"the cosine similarity -1\.0000; at least 0\.99"):
        export(trained, models, expect=write(models / "rows.npz", rows=-rows_of(trained)), precision=precision)


def rows_of(trained: Path) -> Any:
    return np.load(trained / "rows.npz")["rows"]


def export(trained: Path, models: Path, name: str = "mine", **options: Any) -> Any:
    target = Target(model_repository=models, name=name, overwrite=True)
    defaults: dict[str, Any] = {"fields": RIGHT, "max_sequence_tokens": 16}
    return export_checkpoint(trained / "weights.safetensors", target, **defaults | options)


def test_expected_rows_of_a_model_that_takes_vectors(trained: Path, models: Path, tmp_path: Path) -> None:
    table = load_file(trained / "weights.safetensors")["embedding.weight"]
    vectors = table[torch.from_numpy(ARRAYS["input_ids"])].numpy()
    given = write(tmp_path / "rows.safetensors", input_ids=None, inputs_embeds=vectors, rows=rows_of(trained))
    exported = export(trained, models, expect=given, model_input="embeddings")
    assert exported.manifest.parity.expected_rows == 7
    with pytest.raises(ExpectedFileError, match=r"rows\.npz holds input_ids; this model takes inputs_embeds"):
        export(trained, models, expect=trained / "rows.npz", model_input="embeddings")


@pytest.mark.system
def test_hf_and_onnx_compare_expected_rows(models: Path, tmp_path: Path) -> None:
    ids, rows = (cases[0][None] for cases in golden_cases("hf-bert"))
    given = write(tmp_path / "bert.npz", input_ids=ids, attention_mask=np.ones_like(ids), rows=rows)
    target = Target(model_repository=models, name="bert", overwrite=True)
    exported = export_hf(DATA / "hf-bert", target, ids_only=True, expect=given, max_sequence_tokens=40)
    assert exported.manifest.parity.expected_rows == rows.shape[1]
    other = write(tmp_path / "other.npz", input_ids=ids, attention_mask=np.ones_like(ids), rows=rows[..., ::-1])
    with pytest.raises(ExpectedRowsError):
        export_hf(DATA / "hf-bert", target, ids_only=True, expect=other, max_sequence_tokens=40)
    file = save(build(with_types=True), tmp_path / "encoder.onnx")
    with pytest.raises(ExpectedRowsError):
        export_onnx(file, target, OnnxOptions(max_sequence_tokens=16), expect=write(tmp_path / "ones.npz"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rows": None},
            "must hold attention_mask, rows, and either input_ids or inputs_embeds; it holds input_ids, att",
        ),
        ({"inputs_embeds": np.ones((2, 5, 8), np.float32)}, "it holds .*inputs_embeds"),
        ({"rows": np.ones((2, 5, 8))}, r"rows must be float32 \(batch, seq, d_model\), .*; was float64 \(2, 5, 8\)"),
        ({"rows": np.ones((2, 5, 8), np.float16)}, r"rows must be float32 .*was float16"),
        ({"rows": np.ones((5, 8), np.float32)}, r"rows must be .*; was float32 \(5, 8\)"),
        ({"rows": np.ones((2, 4, 8), np.float32)}, r"attention_mask, \(2, 5\); was float32 \(2, 4, 8\)"),
        ({"attention_mask": MASK == 1}, r"attention_mask must be int64 \(batch, seq\), .*; was bool \(2, 5\)"),
        (
            {"attention_mask": MASK[:, ::-1].copy()},
            r"must start with 1 for its tokens .* 0 for padding\. Pad on the right",
        ),
        ({"attention_mask": 2 * MASK}, "1 for its tokens"),
        ({"attention_mask": 0 * MASK}, "1 for its tokens"),
        ({"input_ids": np.array([["a"] * 5] * 2)}, "input_ids must be int64"),
        ({"rows": np.array([[[{}]]])}, r"is not a readable \.safetensors file or \.npz file"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ExpectedFileError, match=message):
        read_expected(write(tmp_path / "rows.npz", **changed))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"text"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".npy"])
def test_broken_files_are_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    with pytest.raises(ExpectedFileError, match=r"is not a readable \.safetensors file or \.npz file of numpy\.savez"):
        read_expected(path)


def test_a_file_of_one_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ARRAYS["rows"])
    with pytest.raises(ExpectedFileError, match=r"\.npz file of numpy\.savez"):
        read_expected(tmp_path / "rows.npy")


def test_padding_may_have_any_values(tmp_path: Path) -> None:
    rows = np.where(MASK[..., None] == 1, np.ones((2, 5, 8), np.float32), np.float32(np.nan))
    assert read_expected(write(tmp_path / "rows.npz", rows=rows)).rows.shape == (2, 5, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": np.ones((2, 5, 8), np.float32)}, r"rows must have the model's d_model 32; was \(2, 5, 8\)"),
        ({"input_ids": np.full((2, 5), 40)}, "input_ids must be from 0 to 39, padding included; was 40 to 40"),
        ({"input_ids": np.full((2, 5), -1)}, "was -1 to -1"),
    ],
)
def test_expected_rows_of_another_model_are_refused(
    trained: Path, models: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    given = write(tmp_path / "rows.npz", **{"rows": np.ones((2, 5, 32), np.float32)} | changed)
    with pytest.raises(ExpectedFileError, match=message):
        export(trained, models, expect=given)


def test_a_sequence_that_is_too_long_is_refused(trained: Path, models: Path) -> None:
    with pytest.raises(ExpectedFileError, match=r"at most 4 tokens, the model's max_sequence_tokens; was 5"):
        export(trained, models, expect=trained / "rows.npz", max_sequence_tokens=4)
