"""Builds replies of the RPC Inspect, which encoder.proto defines. The model has 2 layers, 2 heads and d_model 8."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from encserve_proto.v1 import encoder_pb2 as pb

N_LAYERS, N_HEADS, D_MODEL, LONGEST = 2, 2, 8, 64


def tensor_of(kind: int, n_tokens: int) -> npt.NDArray[np.float32]:
    """Return the tensor of one kind: attention weights or hidden states of all layers, or the position table.

    Each number depends on the number's index and on the kind.
    """
    shapes: dict[int, tuple[int, ...]] = {
        pb.INSPECT_KIND_ATTENTION_WEIGHTS: (N_LAYERS, N_HEADS, n_tokens, n_tokens),
        pb.INSPECT_KIND_HIDDEN_STATES: (N_LAYERS + 1, n_tokens, D_MODEL),
        pb.INSPECT_KIND_POSITIONS: (LONGEST, D_MODEL),
    }
    shape = shapes[kind]
    return np.asarray(np.arange(math.prod(shape)) / 4 + kind, np.float32).reshape(shape)


def inspection(
    request: pb.InspectRequest, n_tokens: int, *, max_chunk_bytes: int | Sequence[int] = 1000
) -> list[pb.InspectResponse]:
    """Return all messages of the reply. Each chunk has at most `max_chunk_bytes` bytes of one tensor.

    `max_chunk_bytes` may be a sequence of limits. Then each chunk uses the next limit. After the last limit, the first
    limit follows again.
    """
    dtype = "<f2" if request.data_type == pb.DATA_TYPE_FLOAT16 else "<f4"
    header = pb.InspectHeader(
        model="tiny",
        model_version="1",
        fingerprint="f" * 16,
        space_id="s2-" + "5" * 32,
        sequence=pb.SequenceInfo(token_count=n_tokens, original_token_count=n_tokens),
        timings=pb.Timings(tokenize_seconds=0.001, queue_seconds=0.002, compute_seconds=0.003),
    )
    if not request.input.HasField("embeddings"):
        header.sequence.tokens.extend(f"t{i}" for i in range(n_tokens))
    arrays: list[npt.NDArray[Any]] = []
    for spec in request.tensors:
        array = tensor_of(spec.kind, n_tokens)
        layers = list(spec.layers)
        if spec.kind != pb.INSPECT_KIND_POSITIONS:
            layers = layers or list(range(len(array)))
            array = array[layers]
        arrays.append(array)
        header.tensors.append(
            pb.InspectTensor(kind=spec.kind, layers=layers, shape=array.shape, data_type=request.data_type)
        )
    parts = [pb.InspectResponse(header=header)]
    sizes = [max_chunk_bytes] if isinstance(max_chunk_bytes, int) else list(max_chunk_bytes)
    for index, array in enumerate(arrays):
        data = array.astype(dtype).tobytes()
        start = 0
        while start < len(data):
            size = sizes[len(parts) % len(sizes)]
            chunk = pb.TensorChunk(tensor=index, data=data[start : start + size])
            parts.append(pb.InspectResponse(chunk=chunk))
            start += size
    return parts
