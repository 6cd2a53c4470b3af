"""BGE-M3's multi-vectors and sparse weights, from two files beside the encoder.

modules.json describes the dense vectors. The formulas are from FlagEmbedding, the authors' code.
"""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from encserve_export.core.errors import CheckpointFileError
from encserve_export.kinds.spec import ModelSpec, ModuleFacts, MultiVectorHead, SparseHead
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import read_checkpoint, read_object
from encserve_proto.bundle.v1 import manifest_pb2

_MULTI_VECTOR_FILE, _SPARSE_FILE = "colbert_linear.pt", "sparse_linear.pt"
_WITHOUT_WEIGHT = ("cls_token", "eos_token", "pad_token", "unk_token")
_REMARK = (
    "sentence-transformers cuts texts to max_seq_length, FlagEmbedding to 512 tokens by default; "
    "--max-sequence-tokens 512 does the same"
)


def with_bge_m3(spec: ModelSpec, directory: Path, tokenizer: TokenizerFile | None) -> ModelSpec:
    """Add the heads from the two files; without these files return the spec unchanged.

    Args:
        spec: The spec of the dense vectors.
        directory: The folder of the encoder.
        tokenizer: Its tokenizer.

    Raises:
        CheckpointFileError: A file is unreadable or not a linear layer, or no file names the special tokens.
        UnsafeWeightsError: A file holds more than tensors.
    """
    if (directory / _MULTI_VECTOR_FILE).is_file():
        linear, facts = _linear(directory / _MULTI_VECTOR_FILE, "ColbertLinear")
        layers = nn.Sequential(linear, _Normalize())
        head = MultiVectorHead(layers.eval().requires_grad_(False), "meanmaxsim", skips_first_token=True)
        spec = dataclasses.replace(spec, multi_vector=head, remark=_REMARK, modules=(*spec.modules, facts))
    if (directory / _SPARSE_FILE).is_file():
        linear, facts = _linear(directory / _SPARSE_FILE, "SparseLinear")
        if linear.out_features != 1:
            raise CheckpointFileError(
                f"{directory / _SPARSE_FILE} must make one number of a row; it makes {linear.out_features}"
            )
        weights = SparseHead(
            nn.Sequential(linear, nn.ReLU()).eval().requires_grad_(False),
            manifest_pb2.SPARSE_POOLING_OWN_ID,
            skipped_token_ids=_special_ids(directory, tokenizer),
        )
        spec = dataclasses.replace(spec, sparse=weights, remark=_REMARK, modules=(*spec.modules, facts))
    return spec


class _Normalize(nn.Module):
    """Scales vectors to length 1; a vector of zeros stays."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(tokens, width) to the same."""
        return nn.functional.normalize(vectors, p=2, dim=-1)


def _linear(path: Path, kind: str) -> tuple[nn.Linear, ModuleFacts]:
    tensors = read_checkpoint(path).tensors
    weight = tensors.get("weight")
    if not {"weight"} <= tensors.keys() <= {"weight", "bias"} or weight is None or weight.dim() != 2:
        raise CheckpointFileError(
            f"{path} must hold weight and bias of a linear layer; was {', '.join(sorted(tensors))}"
        )
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors)
    try:
        linear.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise CheckpointFileError(f"{path}: {error}") from None
    return linear, ModuleFacts(kind, {}, tensors)


def _special_ids(directory: Path, tokenizer: TokenizerFile | None) -> tuple[int, ...]:
    """The ids of the special tokens that the directory names: they have no weight."""
    if tokenizer is None:
        raise CheckpointFileError(
            f"{directory / _SPARSE_FILE} needs a tokenizer.json beside it, which says which tokens have no weight"
        )
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_object(directory / name) if (directory / name).is_file() else {}
        for token in _WITHOUT_WEIGHT:
            named = settings.get(token)
            if named is not None:
                found[token] = named["content"] if isinstance(named, dict) else named
    ids = Tokenizer.from_file(str(tokenizer.path)).token_to_id
    return tuple(sorted({number for token in found.values() if (number := ids(token)) is not None}))
