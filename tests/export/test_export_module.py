"""The bundle of a user's PyTorch module returns the same hidden states as the module."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import worst_relative_error
from onnxruntime import InferenceSession
from torch import Tensor, nn

from encserve_export import Target, export_module
from encserve_export.core.errors import (
    BundleExistsError,
    ConfigError,
    ParityError,
    TokenizerError,
    UnsupportedModelError,
    VocabularyError,
)
from encserve_export.core.precision import Precision
from encserve_export.source.tokenizer import TokenizerFile
from encserve_proto.bundle.v1 import manifest_pb2

VOCAB_SIZE, D_MODEL = 40, 32
CONFIGURATION = {"activation": "gelu", "norm_first": True, "n_heads": 4}


class Rows(nn.Module):
    """The same wrapper module as in docs/how-to/export-module-or-onnx.md."""

    def __init__(self, embedding: nn.Module, encoder: nn.TransformerEncoder) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states, float32 (batch, seq, d_model)."""
        rows: Tensor = self.encoder(self.embedding(ids), src_key_padding_mask=~mask)
        return rows


class Mixing(nn.Module):
    """A small encoder. The hidden state of a token depends on this token and on the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding: nn.Module = nn.Embedding(VOCAB_SIZE, D_MODEL)
        self.mean = nn.Linear(D_MODEL, D_MODEL)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states, float32 (batch, seq, d_model)."""
        x = self.embedding(inputs)  # (batch, seq, d_model)
        kept = mask[..., None]  # (batch, seq, 1)
        mean = (x * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)  # (batch, 1, d_model)
        rows: Tensor = self.dropout(x + self.mean(x * mean))
        return rows


@pytest.fixture
def module() -> Mixing:
    return Mixing().eval()


@pytest.fixture
def target(models: Path) -> Target:
    return Target(model_repository=models, name="mine")


def export(module: nn.Module, target: Target, **options: Any) -> Any:
    defaults: dict[str, Any] = {"configuration": CONFIGURATION, "vocab_size": VOCAB_SIZE, "max_sequence_tokens": 20}
    return export_module(module, target, **defaults | options)


@pytest.fixture
def _without_the_fast_path() -> Any:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.system  # too slow for the fast tests: PyTorch's dynamo exporter needs several seconds
@pytest.mark.usefixtures("_without_the_fast_path")
@pytest.mark.parametrize("norm_first", [True, False])
def test_pytorchs_own_encoder_is_exported(target: Target, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D_MODEL, 4, 64, activation="gelu", batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    module = Rows(nn.Embedding(VOCAB_SIZE, D_MODEL), encoder).eval()
    assert_rows(export(module, target).path, module)


def test_the_manifest_describes_the_module(module: Mixing, target: Target) -> None:
    exported = export(module, target, pooling="last_token", l2_normalize=True)
    manifest = exported.manifest
    assert (manifest.source.kind, manifest.source.description) == ("module", "Mixing")
    assert (manifest.encoder.d_model, manifest.encoder.vocab_size, manifest.encoder.max_sequence_tokens) == (32, 40, 20)
    assert (manifest.pooling, manifest.l2_normalize) == (manifest_pb2.POOLING_LAST_TOKEN, True)
    assert not manifest.HasField("inspect_graph")
    assert manifest.parity.tolerance == 5e-5
    assert 0 < manifest.parity.max_relative_error <= 5e-5
    assert "torch" in manifest.source.versions
    assert_rows(exported.path, module)


def assert_rows(bundle: Path, module: nn.Module) -> None:
    """Check that the bundle and the module return the same hidden states for a padded batch. Ignore the padding."""
    ids = np.arange(24).reshape(3, 8)
    mask = (np.arange(8) < np.array([[8], [3], [1]])).astype(np.int64)
    (rows,) = InferenceSession(bundle / "model.onnx").run(None, {"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        want = module(torch.from_numpy(ids), torch.from_numpy(mask) == 1).numpy()
    assert worst_relative_error(rows[mask == 1], want[mask == 1]) <= 5e-5


def test_a_module_may_take_vectors(module: Mixing, target: Target) -> None:
    module.embedding = nn.Identity()
    exported = export(module, target, input="embeddings", vocab_size=None, d_model=D_MODEL)
    graph = exported.manifest.graph
    assert (graph.input_ids_name, graph.embeddings_name) == ("", "inputs_embeds")
    assert (exported.manifest.encoder.vocab_size, exported.manifest.encoder.d_model) == (0, D_MODEL)


@pytest.mark.parametrize(("precision", "model_input"), [("float16", "token_ids"), ("int8", "embeddings")])
def test_precisions(module: Mixing, target: Target, precision: Precision, model_input: str) -> None:
    options: dict[str, Any] = {"precision": precision}
    if model_input == "embeddings":
        module.embedding = nn.Identity()
        options |= {"input": "embeddings", "vocab_size": None, "d_model": D_MODEL}
    manifest = export(module, target, **options).manifest
    assert manifest.graph.precision == precision
    assert 0.99 <= manifest.parity.min_cosine < 1


def test_a_module_stays_in_training_mode(module: Mixing, target: Target) -> None:
    module.train()
    module.mean.eval()
    export(module, target)
    assert (module.training, module.dropout.training, module.mean.training) == (True, True, False)


def test_weights_and_configuration_determine_the_space_id(module: Mixing, target: Target, models: Path) -> None:
    def space(name: str, **options: Any) -> str:
        exported = export(module, Target(model_repository=models, name=name), **options)
        return str(exported.manifest.space_id)

    first = space("one")
    assert space("again") == first
    assert space("other", configuration=CONFIGURATION | {"norm_first": False}) != first
    with torch.no_grad():
        module.mean.weight[0, 0] += 1
    assert space("trained") != first


class ByNumbers(Mixing):
    """A module with a branch for large values of a tensor.

    A trace with small values does not record this branch.
    """

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        rows = super().forward(inputs, mask)
        if rows.abs().max() > 100:
            return rows / 2
        return rows


class ByMask(Mixing):
    """A module that computes the longest length from the mask, and shortens the batch to this length."""

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        longest = int(mask.sum(1).max())
        rows = super().forward(inputs[:, :longest], mask[:, :longest])
        return nn.functional.pad(rows, (0, 0, 0, inputs.shape[1] - longest))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByNumbers, "Could not guard on data-dependent expression .*shows the line"),
        (ByMask, "Could not extract specialized integer from data-dependent expression .*shows the line"),
    ],
)
def test_the_error_for_data_dependent_control_flow_has_torchs_reason(
    module: Mixing, target: Target, models: Path, kind: type[Mixing], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"PyTorch cannot export {kind.__name__} as one graph: {reason}"):
        export(kind(), target)
    assert not models.exists()
    assert capfd.readouterr() == ("", f"encserve-export: running {kind.__name__}\n"), "PyTorch printed something"


class WithoutMask(Mixing):
    """A module that ignores its mask, so padding changes the hidden states."""

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return super().forward(inputs, mask | ~mask)


def test_a_module_that_ignores_its_mask_is_refused(target: Target, models: Path) -> None:
    with pytest.raises(ParityError, match="WithoutMask gives different rows in a padded batch, even in PyTorch"):
        export(WithoutMask(), target)
    assert not models.exists()


class Returning(nn.Module):
    """A module that returns the given object. If the object is an exception, the module raises this exception."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, inputs: Tensor, mask: Tensor) -> Any:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (ValueError("no such\nthing"), r"Returning does not run on the CPU with .* \(2, 7\) .*: no such"),
        ((torch.ones(2, 7, 8),), "must return one tensor of hidden states; was tuple"),
        (
            torch.ones(2, 8),
            r"must return hidden states, float32 \(2, 7, d_model\) .*; was float32 \(2, 8\)\. If it pools, return "
            r"the hidden states before pooling, and give pooling= or --pooling",
        ),
        (torch.ones(7, 2, 8), r"was float32 \(7, 2, 8\)"),
        (torch.ones(2, 7, 8).half(), r"was float16 \(2, 7, 8\)"),
        (torch.full((2, 7, 8), torch.nan), "returns hidden states that are not finite"),
    ],
)
def test_modules_that_are_not_encoders_are_refused(target: Target, models: Path, made: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        export(Returning(made), target)
    assert not models.exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"configuration": {"a": {1}}}, ConfigError, "configuration must be JSON, .* set is not JSON serializable"),
        ({"configuration": {"a": float("nan")}}, ConfigError, "configuration must be JSON"),
        ({"configuration": []}, ConfigError, "configuration must be a dict; was list"),
        ({"input": "text"}, ConfigError, "input must be one of token_ids, embeddings; was 'text'"),
        ({"vocab_size": None}, VocabularyError, "the number of token ids is not known: give vocab_size"),
        ({"vocab_size": 41}, UnsupportedModelError, "does not run .* with token ids up to 40 of .*out of range"),
        ({"d_model": 8}, ConfigError, 'd_model is only for the input "embeddings"'),
        ({"input": "embeddings"}, ConfigError, "d_model must be a number of at least 1"),
        ({"pad_token_id": 40}, ConfigError, "pad_token_id must be from 0 to 39; was 40"),
        ({"pooling": "first"}, ConfigError, "pooling must be one of mean, cls, .*; was 'first'"),
        ({"l2_normalize": True}, ConfigError, "give the pooling too"),
        ({"max_sequence_tokens": 0}, ConfigError, "max_sequence_tokens must be at least 1; was 0"),
        (
            {"input": "embeddings", "d_model": 32, "tokenizer": TokenizerFile(Path("tokenizer.json"), 9, (), {})},
            TokenizerError,
            "this model's input is embeddings; leave the tokenizer out",
        ),
    ],
)
def test_options_out_of_range_are_refused(
    module: Mixing, target: Target, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        export(module, target, **options)


def test_an_existing_version_is_refused_before_anything_runs(target: Target) -> None:
    (target.model_repository / "mine" / "1").mkdir(parents=True)
    with pytest.raises(BundleExistsError):
        export(Returning(ValueError()), target)
