"""These tests export models that take vectors instead of token ids."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import worst_relative_error
from checkpoints import (
    BARE_GOLDENS,
    DATA,
    export_golden_for_embeddings,
    golden_cases,
    golden_embeddings,
    golden_vectors,
)
from click.testing import CliRunner
from onnxruntime import InferenceSession

from encserve_export import EncoderConfig, Target, export_checkpoint, export_init
from encserve_export.cli import main
from encserve_export.core.errors import ConfigError, EmbeddingTableError, TokenizerError
from encserve_export.source.tokenizer import TokenizerFile


@pytest.mark.parametrize("name", BARE_GOLDENS)
def test_a_golden_checkpoint_gives_its_rows_for_vectors(name: str, tmp_path: Path) -> None:
    exported = export_golden_for_embeddings(name, tmp_path)
    session = InferenceSession(exported.path / "model.onnx")
    table = golden_vectors(name)
    for ids, want in zip(*golden_cases(name), strict=True):
        vectors = table[ids][None]  # (1, seq, d_model)
        mask = np.ones(vectors.shape[:2], np.int64)
        (rows,) = session.run(None, {"inputs_embeds": vectors, "attention_mask": mask})
        assert worst_relative_error(rows[0], want) <= 5e-5


def test_the_manifest_names_the_input(tmp_path: Path) -> None:
    manifest = export_golden_for_embeddings("split-qkv", tmp_path).manifest
    assert manifest.encoder.vocab_size == 0
    assert (manifest.graph.input_ids_name, manifest.graph.embeddings_name) == ("", "inputs_embeds")
    assert {part.part: part.count for part in manifest.parameters}["embedding"] == 0


def test_an_unused_embedding_table_is_left_out_and_named(tmp_path: Path) -> None:
    steps: list[str] = []
    path = DATA / "raw-matrices" / "checkpoint.safetensors"
    fields = {"norm": "post", "activation": "relu", "n_heads": 2, "position": "none", "max_sequence_tokens": 16}
    target = Target(model_repository=tmp_path, name="m")
    export_checkpoint(path, target, fields=fields, model_input="embeddings", progress=steps.append)
    assert "W_embed is left out: the input is embeddings" in steps


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"scale_embedding": True}, "scale_embedding is false in the weights, true in --config"),
        ({"vocab_size": 97}, "vocab_size is 0 in the weights, 97 in --config"),
        ({"input": "token_ids"}, 'input is "embeddings" in the weights, "token_ids" in --config'),
    ],
)
def test_a_configuration_for_token_ids_is_refused(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    path = DATA / "fused-qkv" / "checkpoint.safetensors"
    given = {"n_heads": 4, "norm": "post", "activation": "relu", "position": "none", **fields}
    with pytest.raises(ConfigError, match=text):
        export_checkpoint(path, Target(model_repository=tmp_path, name="m"), fields=given, model_input="embeddings")


def test_embeddings_is_refused_for_a_model_that_takes_vectors(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingTableError, match="it needs no embedding table: remove --embeddings "):
        export_checkpoint(
            DATA / "fused-qkv" / "checkpoint.safetensors",
            Target(model_repository=tmp_path, name="m"),
            embeddings=golden_embeddings("fused-qkv"),
            model_input="embeddings",
        )


def test_the_error_for_a_missing_table_names_two_options(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingTableError, match=r"with --embeddings: .* --input embeddings\. Then callers"):
        export_checkpoint(DATA / "fused-qkv" / "checkpoint.safetensors", Target(model_repository=tmp_path, name="m"))


def test_a_tokenizer_is_refused_for_vectors(tmp_path: Path, tiny: EncoderConfig) -> None:
    config = dataclasses.replace(tiny, input="embeddings", vocab_size=0)
    tokenizer = TokenizerFile(tmp_path / "tokenizer.json", 10, (), {})
    with pytest.raises(TokenizerError, match="this model's input is embeddings; leave the tokenizer out"):
        export_init(config, 0, Target(model_repository=tmp_path, name="m"), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"vocab_size": 5}, "vocab_size must be 0 if the input is embeddings; was 5"),
        ({"pad_token_id": 1}, "pad_token_id must be 0 if the input is embeddings; was 1"),
        ({"scale_embedding": True}, "scale_embedding must be false"),
    ],
)
def test_token_id_settings_are_refused_for_vectors(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EncoderConfig.from_mapping({"input": "embeddings", **fields})


def test_init_reads_the_input_from_its_configuration(tmp_path: Path) -> None:
    fields = {"input": "embeddings", "d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 1, "max_sequence_tokens": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arguments = ["init", "--model-repository", str(tmp_path), "--name", "m", "--config", str(tmp_path / "config.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    session = InferenceSession(tmp_path / "m" / "1" / "model.onnx")
    assert [value.name for value in session.get_inputs()] == ["inputs_embeds", "attention_mask"]


def test_the_command_exports_a_model_that_takes_vectors(tmp_path: Path) -> None:
    fields = {"n_heads": 4, "norm": "post", "activation": "relu", "position": "none", "max_sequence_tokens": 16}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    file = DATA / "fused-qkv" / "checkpoint.safetensors"
    arguments = ["checkpoint", str(file), "--model-repository", str(tmp_path), "--name", "m", "--input", "embeddings"]
    result = CliRunner().invoke(main, [*arguments, "--config", str(tmp_path / "config.json")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "m" / "1" / "manifest.json").is_file()
