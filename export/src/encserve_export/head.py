"""What a model makes of its rows, or of pooled ones, written as ONNX; modules of sentence-transformers are read too."""

import dataclasses
import inspect
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from encserve_export.errors import CheckpointFileError, ParityError, UnsupportedModelError
from encserve_export.runtime import onnxruntime
from encserve_export.weights import read_object, read_weights
from encserve_proto.bundle.v1 import manifest_pb2

M = TypeVar("M", bound=nn.Module)

FILE = "head.onnx"
MULTI_VECTOR_FILE, SPARSE_FILE = "multi_vector.onnx", "sparse.onnx"
_POOLED, _ROWS, _MASK, _OUTPUT = "pooled", "rows", "mask", "vectors"
_OPSET = 20
_TOLERANCE, _WEIGHT_TOLERANCE = 1e-5, 1e-4
# What an activation may be: a class of torch.nn that needs no arguments.
_ACTIVATIONS = ("torch.nn.modules.activation.", "torch.nn.modules.linear.Identity")
_TANH = "torch.nn.modules.activation.Tanh"


@dataclasses.dataclass(frozen=True)
class MultiVectorHead:
    """What makes the vectors of MaxSim of a model's rows.

    Attributes:
        module: (tokens, d_model) -> (tokens, width).
        similarity: "maxsim" or "meanmaxsim".
        skips_first_token: Whether the first token has no vector.
    """

    module: nn.Module
    similarity: str
    skips_first_token: bool = False


@dataclasses.dataclass(frozen=True)
class SparseHead:
    """What makes weights over the vocabulary of a model's rows.

    Attributes:
        module: (batch, seq, d_model) and a mask (batch, seq) of 1 and 0 -> (batch, width), pooled; with
            SPARSE_POOLING_OWN_ID (tokens, d_model) -> (tokens, 1).
        pooling: How it pools.
        skipped_token_ids: Tokens that have no weight; only with SPARSE_POOLING_OWN_ID.
        max_active_dims: How many of the largest weights are kept; 0 for all.
    """

    module: nn.Module
    pooling: manifest_pb2.SparsePooling
    skipped_token_ids: tuple[int, ...] = ()
    max_active_dims: int = 0


class StaticWeights(nn.Module):
    """A weight for each token that occurs in a text, without a run of the model.

    Attributes:
        weight: float32 (width,).
        tokenizer: A tokenizer.json, parsed, that puts nothing around a text.
        files: Where both lie in a bundle, and the longest text.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, tokenizer: Mapping[str, Any], files: manifest_pb2.StaticSparse) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float())
        self.tokenizer = tokenizer
        self.files = files

    def write(self, folder: Path) -> list[Path]:
        """Writes its two files."""
        tokenizer, weights = folder / self.files.tokenizer_file, folder / self.files.weights_file
        tokenizer.write_text(json.dumps(self.tokenizer, ensure_ascii=False), encoding="utf-8")
        np.save(weights, self.weight.numpy())
        return [tokenizer, weights]


class Normalize(nn.Module):
    """Scales vectors to length 1; one of zeros stays."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, width) to the same."""
        return nn.functional.normalize(vectors, p=2, dim=-1)


class Dense(nn.Module):
    """A linear layer and an activation, with a way around both where the model has one."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.residual = residual

    def forward(self, vectors: Tensor) -> Tensor:
        """(batch, in_features) to (batch, out_features)."""
        made: Tensor = self.activation(self.linear(vectors))
        return made if self.residual is None else made + self.residual(vectors)


def read_dense(folder: Path) -> Dense:
    """Reads a Dense module.

    Raises:
        UnsupportedModelError: Its input is not the sentence's vector, or its activation is code of its own.
        CheckpointFileError: A file is missing, or its sizes are not those of its weights.
    """
    path = folder / "config.json"
    settings = read_object(path)
    for end in ("module_input_name", "module_output_name"):
        if settings.get(end) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(f"{path}: {end} must be sentence_embedding; was {settings[end]!r}")
    sizes = [_size(path, settings, name) for name in ("in_features", "out_features")]
    residual: nn.Module | None = None
    if settings.get("use_residual"):
        residual = nn.Identity() if sizes[0] == sizes[1] else nn.Linear(sizes[0], sizes[1], bias=False)
    linear = nn.Linear(sizes[0], sizes[1], bias=bool(settings.get("bias", True)))
    return _filled(Dense(linear, _activation(path, settings.get("activation_function", _TANH)), residual), folder)


def read_layer_norm(folder: Path) -> nn.LayerNorm:
    """Reads a LayerNorm module.

    Raises:
        CheckpointFileError: A file is missing, or its size is not that of its weights.
    """
    path = folder / "config.json"
    return _filled(nn.LayerNorm(_size(path, read_object(path), "dimension")), folder, prefix="norm.")


def write_head(head: nn.Sequential, pooled_width: int, folder: Path) -> manifest_pb2.Head:
    """Writes what comes after pooling as ONNX: (batch, pooled_width) to (batch, width), in float32.

    Raises:
        CheckpointFileError: It does not take vectors of `pooled_width` numbers.
        ParityError: ONNX Runtime gives other vectors than PyTorch.
    """
    example = _example(_POOLED, 3, pooled_width)  # (batch, pooled_width)
    width = _write(head, example, folder / FILE, "the modules after pooling")
    return manifest_pb2.Head(file=FILE, input_name=_POOLED, output_name=_OUTPUT, width=width)


def write_multi_vector(head: MultiVectorHead, d_model: int, folder: Path) -> manifest_pb2.MultiVector:
    """Writes what makes the vectors of MaxSim as ONNX: (tokens, d_model) to (tokens, width), in float32.

    Raises:
        CheckpointFileError: It does not take rows of `d_model` numbers.
        ParityError: ONNX Runtime gives other vectors than PyTorch.
    """
    example = _example(_ROWS, 3, d_model)  # (tokens, d_model)
    width = _write(head.module, example, folder / MULTI_VECTOR_FILE, "the modules after the encoder")
    return manifest_pb2.MultiVector(
        file=MULTI_VECTOR_FILE,
        input_name=_ROWS,
        output_name=_OUTPUT,
        width=width,
        similarity=head.similarity,
        skips_first_token=head.skips_first_token,
    )


def write_sparse(head: SparseHead, shape: manifest_pb2.EncoderShape, folder: Path) -> manifest_pb2.Sparse:
    """Writes what makes weights over the vocabulary as ONNX, in float32, with its own weights in a file beside it.

    Raises:
        CheckpointFileError: It does not take rows of `d_model` numbers.
        ParityError: ONNX Runtime gives other weights than PyTorch.
    """
    own_id = head.pooling == manifest_pb2.SPARSE_POOLING_OWN_ID
    example = _example(_ROWS, 3, shape.d_model)  # (tokens, d_model)
    if not own_id:
        example = _example(_ROWS, 2, 3, shape.d_model)  # (batch, seq, d_model)
        example[_MASK] = torch.tensor([[1.0, 1, 1], [1, 1, 0]])  # (batch, seq)
    path = folder / SPARSE_FILE
    width = _write(head.module, example, path, "what makes weights over the vocabulary", weights=True)
    onnx.save_model(
        onnx.load_model(path),
        path,
        save_as_external_data=True,
        location=f"{SPARSE_FILE}.data",
        size_threshold=1024,
        convert_attribute=True,
    )
    return manifest_pb2.Sparse(
        file=SPARSE_FILE,
        rows_name=_ROWS,
        mask_name="" if own_id else _MASK,
        output_name=_OUTPUT,
        width=shape.vocab_size if own_id else width,
        pooling=head.pooling,
        skipped_token_ids=head.skipped_token_ids,
        max_active_dims=head.max_active_dims,
    )


def _example(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0))}


def _write(module: nn.Module, example: Mapping[str, Tensor], path: Path, what: str, *, weights: bool = False) -> int:
    """Writes a module as ONNX, compares it with PyTorch, and tells the width of its output, (n, width).

    Args:
        module: What is written.
        example: Its inputs, in order: (n, width), or (n, seq, width) and (n, seq).
        path: Where to.
        what: What it is, for errors.
        weights: Whether it makes weights over the vocabulary.
    """
    rows = next(iter(example.values()))
    axes = dict(enumerate(("n", "seq")[: rows.dim() - 1]))
    try:
        want = module(*example.values())  # (n, its width)
    except RuntimeError as error:
        raise CheckpointFileError(f"{what} do not take {rows.shape[-1]} numbers: {error}") from None
    with warnings.catch_warnings():  # as for the graph, and what is told of transformers' code; the comparison judges
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(example.values()),
            str(path),
            input_names=list(example),
            output_names=[_OUTPUT],
            dynamic_axes={**dict.fromkeys(example, axes), _OUTPUT: {0: "n"}},
            opset_version=_OPSET,
            dynamo=False,
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run([_OUTPUT], {name: its.numpy() for name, its in example.items()})
    difference = torch.from_numpy(got) - want  # (n, its width)
    if weights:  # there may be none that is not 0, or one that is nearly
        worst, tolerance = float(difference.abs().max() / want.max().clamp(min=1)), _WEIGHT_TOLERANCE
    else:
        worst, tolerance = float((difference.norm(dim=1) / want.norm(dim=1).clamp(min=1e-12)).max()), _TOLERANCE
    if not worst <= tolerance:
        raise ParityError(f"{what} differ from PyTorch: error {worst:.1e}, at most {tolerance:.1e}")
    return int(want.shape[1])


def _size(path: Path, settings: dict[str, Any], name: str) -> int:
    size = settings.get(name)
    if type(size) is not int or size < 1:
        raise CheckpointFileError(f"{path} must give {name} as a number from 1; was {size!r}")
    return size


def _activation(path: Path, name: Any) -> nn.Module:
    plain = str(name)
    found = getattr(nn, plain.rpartition(".")[2], None) if plain.startswith(_ACTIVATIONS) else None
    try:
        if not (inspect.isclass(found) and issubclass(found, nn.Module)):
            raise TypeError
        made: nn.Module = found()
    except TypeError:
        raise UnsupportedModelError(
            f"{path}: activation_function must be one of torch.nn that needs no arguments; was {plain}"
        ) from None
    return made


def _filled(module: M, folder: Path, prefix: str = "") -> M:
    """The module with the weights in its folder."""
    found = {name.removeprefix(prefix): tensor.float() for name, tensor in read_weights(folder).tensors.items()}
    try:
        module.load_state_dict(found)
    except RuntimeError as error:
        raise CheckpointFileError(f"{folder}: its weights are not those of its config.json: {error}") from None
    return module
