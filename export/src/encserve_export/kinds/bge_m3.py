"""Reads BGE-M3's heads for multi-vectors and sparse weights from two files in the encoder's folder.

modules.json describes only the modules for dense vectors. The formulas are from FlagEmbedding, the code of BGE-M3's
authors.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from encserve_export.core.errors import CheckpointFileError
from encserve_export.kinds.spec import ModelSpec, ModuleFacts, MultiVectorHead, SparseHead
from encserve_export.source.weights import read_checkpoint
from encserve_proto.bundle.v1 import manifest_pb2

_MULTI_VECTOR_FILE, _SPARSE_FILE = "colbert_linear.pt", "sparse_linear.pt"
_WITHOUT_WEIGHT = ("cls_token", "eos_token", "pad_token", "unk_token")
_REMARK = (
    "sentence-transformers cuts texts to max_seq_length, but FlagEmbedding cuts texts to 512 tokens by default. To cut "
    "texts as FlagEmbedding does, give --max-sequence-tokens 512"
)


def with_bge_m3(spec: ModelSpec) -> ModelSpec:
    """Add the heads from the two files in the encoder's folder. Without these files, return the spec unchanged.

    Raises:
        CheckpointFileError: A file is unreadable, or does not contain a linear layer of the right size. Or the
            directory has the file for sparse weights, but no tokenizer.
        UnsafeWeightsError: A file contains objects that are not tensors.
    """
    multi_vector, sparse = (spec.encoder / name for name in (_MULTI_VECTOR_FILE, _SPARSE_FILE))
    if multi_vector.is_file():
        linear, facts = _linear(multi_vector, "ColbertLinear")
        layers = nn.Sequential(linear, _Normalize())
        head = MultiVectorHead(layers.eval().requires_grad_(False), "meanmaxsim", skips_first_token=True)
        spec = dataclasses.replace(spec, multi_vector=head, remark=_REMARK, modules=(*spec.modules, facts))
    if sparse.is_file():
        linear, facts = _linear(sparse, "SparseLinear")
        if linear.out_features != 1:
            raise CheckpointFileError(f"{sparse} must have 1 output per token; was {linear.out_features}")
        if spec.tokenizer is None:
            raise CheckpointFileError(
                f"{sparse.parent} has no tokenizer, but {_SPARSE_FILE} needs one: special tokens get no weight, and "
                "the exporter reads their ids from the tokenizer"
            )
        special = spec.tokenizer.special_tokens_map
        tokens = [special[name] for name in _WITHOUT_WEIGHT if name in special]
        weights = SparseHead(
            nn.Sequential(linear, nn.ReLU()).eval().requires_grad_(False),
            manifest_pb2.SPARSE_POOLING_OWN_ID,
            skipped_token_ids=tuple(sorted(set(spec.tokenizer.convert_tokens_to_ids(tokens)))),
        )
        spec = dataclasses.replace(spec, sparse=weights, remark=_REMARK, modules=(*spec.modules, facts))
    return spec


class _Normalize(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:  # input and result: (tokens, width)
        return nn.functional.normalize(vectors, p=2, dim=-1)


def _linear(path: Path, kind: str) -> tuple[nn.Linear, ModuleFacts]:
    tensors = read_checkpoint(path).tensors
    weight = tensors.get("weight")
    if not {"weight"} <= tensors.keys() <= {"weight", "bias"} or weight is None or weight.dim() != 2:
        raise CheckpointFileError(
            f"{path} must hold the weight of a linear layer, and may hold its bias; was {', '.join(sorted(tensors))}"
        )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors)
    try:
        linear.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise CheckpointFileError(f"{path}: {error}") from None
    return linear, ModuleFacts(kind, {}, tensors)
