"""Writes the heads of a model as ONNX. A head computes the final vectors or scores from the encoder's output.

A bundle may have up to four heads:

- the modules after pooling,
- the modules that compute vectors for MaxSim, which compares two texts by several vectors per text,
- the modules that compute sparse weights over the vocabulary,
- the modules that compute the logits of labels.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from encserve_export.check.agreement import compare, relative_error
from encserve_export.core.errors import CheckpointFileError, ParityError
from encserve_export.core.float64 import in_float64
from encserve_export.core.precision import HEAD_TOLERANCE, Bounds, tolerance_for
from encserve_export.core.runtime import open_session
from encserve_export.kinds.spec import MultiVectorHead, ScoreHead, SparseHead
from encserve_export.onnx_graph import traced
from encserve_proto.bundle.v1 import manifest_pb2

FILE = "head.onnx"
MULTI_VECTOR_FILE, SPARSE_FILE, SCORES_FILE = "multi_vector.onnx", "sparse.onnx", "scores.onnx"
_POOLED, _ROWS, _MASK, _OUTPUT = "pooled", "rows", "mask", "vectors"
# Each head is compared with PyTorch on this many example vectors. 32 sparse vectors of 250,000 weights take 32 MB.
_ROWS_COMPARED = 32


def write_head(head: nn.Module, pooled_width: int, folder: Path) -> manifest_pb2.Head:
    """Write the modules after pooling. They map float32 (batch, pooled_width) to (batch, width).

    Raises:
        CheckpointFileError: The modules do not accept vectors of `pooled_width` dimensions.
        ParityError: The vectors from ONNX Runtime differ from PyTorch's.
    """
    example = _example(_POOLED, _ROWS_COMPARED, pooled_width)  # (batch, pooled_width)
    width = _write(head, example, folder / FILE, "the modules after pooling")
    return manifest_pb2.Head(file=FILE, input_name=_POOLED, output_name=_OUTPUT, width=width)


def write_multi_vector(head: MultiVectorHead, d_model: int, folder: Path) -> manifest_pb2.MultiVector:
    """Write the modules that compute MaxSim vectors. They map float32 (tokens, d_model) to (tokens, width).

    Raises:
        CheckpointFileError: The modules do not accept hidden states of `d_model` dimensions.
        ParityError: The vectors from ONNX Runtime differ from PyTorch's.
    """
    example = _example(_ROWS, _ROWS_COMPARED, d_model)  # (tokens, d_model)
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
    """Write the modules that compute sparse weights over the vocabulary. Their parameters go to a second file.

    Raises:
        CheckpointFileError: The modules do not accept hidden states of `d_model` dimensions.
        ParityError: The sparse weights from ONNX Runtime differ from PyTorch's.
    """
    own_id = head.pooling == manifest_pb2.SPARSE_POOLING_OWN_ID
    example = _example(_ROWS, _ROWS_COMPARED, shape.d_model)  # (tokens, d_model)
    if not own_id:
        example = _example(_ROWS, 2, _ROWS_COMPARED // 2, shape.d_model)  # (batch, seq, d_model)
        example[_MASK] = torch.ones(example[_ROWS].shape[:2])  # (batch, seq)
        example[_MASK][1, 2:] = 0
    width = _write(head.module, example, folder / SPARSE_FILE, "the modules of the sparse weights", sparse=True)
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


def write_scores(head: ScoreHead, d_model: int, folder: Path) -> manifest_pb2.Scores:
    """Write the modules that compute logits. They map float32 (batch, d_model) to (batch, labels).

    Raises:
        CheckpointFileError: The modules do not accept hidden states of `d_model` dimensions.
        ParityError: The logits from ONNX Runtime differ from PyTorch's.
    """
    example = _example(_POOLED, _ROWS_COMPARED, d_model)  # (batch, d_model)
    _write(head.module, example, folder / SCORES_FILE, "the modules of the scores", small=True)
    return manifest_pb2.Scores(
        file=SCORES_FILE,
        input_name=_POOLED,
        output_name=_OUTPUT,
        labels=head.labels,
        pooling=head.pooling,
        not_last_token_id=head.not_last_token_id,
        activation=head.activation,
        pair_truncation=head.pair_truncation,
    )


def _example(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0))}


def _write(
    module: nn.Module,
    example: Mapping[str, Tensor],
    path: Path,
    what: str,
    *,
    sparse: bool = False,
    small: bool = False,
) -> int:
    """Write a module as ONNX, and compare the results with PyTorch in float64. Return the width of the output.

    The shape of the output is (n, width).

    Args:
        module: The module.
        example: Example inputs, in the order of the module's arguments: (n, width), or (n, seq, width) and (n, seq).
        path: The file to write.
        what: The name of the module in errors.
        sparse: Whether the output is weights over the vocabulary. If so, the module's parameters go to a second file.
        small: Whether the output has few numbers per row, such as one logit.
    """
    rows = next(iter(example.values()))
    axes = dict(enumerate(("n", "seq")[: rows.dim() - 1]))
    try:
        float32 = module(*example.values())  # (n, width)
    except RuntimeError as error:
        raise CheckpointFileError(f"{what} do not accept vectors of {rows.shape[-1]} dimensions: {error}") from None
    with in_float64(module):
        float64 = module(*(tensor.double() for tensor in example.values()))  # (n, width)
    model = traced.trace(
        module,
        tuple(example.values()),
        path,
        inputs=list(example),
        outputs=[_OUTPUT],
        dynamic_axes={**dict.fromkeys(example, axes), _OUTPUT: {0: "n"}},
    )
    with Path(f"{path}.data").open("wb") if sparse else contextlib.nullcontext() as data:
        traced.take_weights(model, traced.fold_weights(model, module), data)
    onnx.save_model(model, path)
    (got,) = open_session(path).run([_OUTPUT], {name: tensor.numpy() for name, tensor in example.items()})
    # The relative error divides by the norm of a row. The sparse weights of a row, or the only logit of a row, may be
    # almost 0. So all numbers of the example are compared as one row.
    got, want, own = (it.reshape(1, -1) if sparse or small else it for it in (got, float64.numpy(), float32.numpy()))
    float32_error = relative_error(own, want)
    bounds = Bounds(error=tolerance_for(HEAD_TOLERANCE, float32_error))
    if excess := compare(got, want, bounds, float32_error).excess:
        raise ParityError(f"{what} differ from PyTorch: {excess}")
    return int(float64.shape[1])
