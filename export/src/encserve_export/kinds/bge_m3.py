"""BGE-M3's other two kinds of vectors, which its authors keep in two files beside the encoder.

Dense vectors are what modules.json says. The formulas are those of FlagEmbedding, its authors' code.
"""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from encserve_export.ground.errors import CheckpointFileError
from encserve_export.kinds.recipe import ModuleFacts, MultiVectorHead, Recipe, SparseHead
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import read_checkpoint, read_object
from encserve_proto.bundle.v1 import manifest_pb2

_MULTI_VECTOR_FILE, _SPARSE_FILE = "colbert_linear.pt", "sparse_linear.pt"
_WITHOUT_WEIGHT = ("cls_token", "eos_token", "pad_token", "unk_token")
_REMARK = (
    "sentence-transformers cuts texts to max_seq_length, FlagEmbedding to 512 tokens unless told otherwise; "
    "--max-sequence-tokens 512 does as the latter"
)


def with_bge_m3(vector: Recipe, directory: Path, tokenizer: TokenizerFile | None) -> Recipe:
    """Adds what the files beside the encoder make of its rows; without them the vector stays as it is.

    Args:
        vector: How dense vectors are made.
        directory: Where the encoder lies.
        tokenizer: Its tokenizer.

    Raises:
        CheckpointFileError: A file is unreadable or not one of a linear layer, or nothing names the special tokens.
        UnsafeWeightsError: A file holds more than tensors.
    """
    if (directory / _MULTI_VECTOR_FILE).is_file():
        linear, facts = _linear(directory / _MULTI_VECTOR_FILE, "ColbertLinear")
        layers = nn.Sequential(linear, _Normalize())
        head = MultiVectorHead(layers.eval().requires_grad_(False), "meanmaxsim", skips_first_token=True)
        vector = dataclasses.replace(vector, multi_vector=head, remark=_REMARK, modules=(*vector.modules, facts))
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
        vector = dataclasses.replace(vector, sparse=weights, remark=_REMARK, modules=(*vector.modules, facts))
    return vector


class _Normalize(nn.Module):
    """Scales vectors to length 1; one of zeros stays."""

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
    """The ids of the tokens that have no weight, as far as the directory names them."""
    if tokenizer is None:
        raise CheckpointFileError(
            f"{directory / _SPARSE_FILE} needs a tokenizer.json beside it, which says which tokens have no weight"
        )
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_object(directory / name) if (directory / name).is_file() else {}
        for token in _WITHOUT_WEIGHT:
            its = settings.get(token)
            if its is not None:
                found[token] = its["content"] if isinstance(its, dict) else its
    ids = Tokenizer.from_file(str(tokenizer.path)).token_to_id
    return tuple(sorted({number for token in found.values() if (number := ids(token)) is not None}))
