"""Describes checkpoints of equal transformer blocks, and recognises such checkpoints by the names of the weights.

A template is a weight name with placeholders: `{layer}` for the index of the block, `{head}` for the index of the
attention head.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from encserve_export.core.errors import WeightShapeError
from encserve_export.models.own.config import EncoderConfig, MergeHeads
from encserve_export.models.own.encoder import Encoder, encoder_of
from encserve_export.models.tensors import check_values

QKV, OUTPUT = "attention.qkv", "attention.output"
ATTENTION_NORM, INNER = "attention_norm", "feed_forward.inner"


@dataclasses.dataclass(frozen=True)
class Part:
    """The weight names of one linear layer or one norm in a checkpoint.

    Attributes:
        weight: Templates of the names of the weight matrices. Several matrices are concatenated along the output axis.
        bias: Templates of the names of the biases; empty for a layer without a bias.
        transposed: Whether a matrix has the shape (in, out), so that the layer computes x @ W.
    """

    weight: tuple[str, ...]
    bias: tuple[str, ...] = ()
    transposed: bool = False


def linear(*names: str) -> Part:
    """Return the `Part` of one or several modules such as `nn.Linear` or `nn.LayerNorm`."""
    return Part(tuple(f"{name}.weight" for name in names), tuple(f"{name}.bias" for name in names))


def matrix(*names: str, bias: tuple[str, ...] = ()) -> Part:
    """Return the `Part` of one or several matrices W for layers that compute x @ W."""
    return Part(names, bias, transposed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """The weight names of one family of checkpoints.

    Attributes:
        name: The layout's name for `--layout`.
        summary: One line that describes the layout to users.
        block: The template of a block's prefix, such as "layers.{layer}."; "" for a checkpoint with only one block.
        parts: The parts of a block, by their names in our `Encoder`. A layout without feed-forward parts has d_ff 0. A
            layout without norms has the norm "none".
        final_norm: The LayerNorm after the last block. It is optional in a checkpoint.
        interleaved: Whether the rows of the projection to Q, K and V are ordered by head. Q, K and V of head 0 come
            first, then Q, K and V of head 1.
        merge_heads: The default of `EncoderConfig.merge_heads`, as in the code that trained these checkpoints.
    """

    name: str
    summary: str
    block: str
    parts: Mapping[str, Part]
    final_norm: Part = Part(("norm.weight",), ("norm.bias",))
    interleaved: bool = False
    merge_heads: MergeHeads = "transpose"

    @property
    def marker(self) -> str:
        """The template of the weight name that identifies the layout."""
        return self.block + self.parts[QKV].weight[0]

    def find_stacks(self, names: Iterable[str]) -> list["Stack"]:
        """Find all stacks of this layout among the weight names of a checkpoint."""
        names = set(names)
        pattern = re.escape(self.marker)
        for number in ("layer", "head"):
            pattern = pattern.replace(rf"\{{{number}\}}", f"(?P<{number}>[0-9]{{1,6}})")
        matches = [match for name in names if (match := re.fullmatch(rf"(?P<root>(?:.+\.)?){pattern}", name))]
        return [
            self._stack(root, [match.groupdict() for match in matches if match["root"] == root], names)
            for root in sorted({match["root"] for match in matches})
        ]

    def _stack(self, root: str, numbers: list[dict[str, str]], names: set[str]) -> "Stack":
        n_layers = len({number.get("layer") for number in numbers})
        n_heads = len({number["head"] for number in numbers}) if "{head}" in self.marker else None
        stack = Stack(self, root, n_layers, n_heads, attention_bias=True, final_norm=True)
        biases = {name for layer in range(n_layers) for part in (QKV, OUTPUT) for name in stack.sources(layer, part)[1]}
        norm = {root + name for name in (*self.final_norm.weight, *self.final_norm.bias)}
        return dataclasses.replace(stack, attention_bias=bool(biases & names), final_norm=bool(norm & names))


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of blocks that was found in a checkpoint.

    Attributes:
        layout: The layout of the weight names.
        root: The prefix of all names: "", or the path of the encoder in a larger model.
        n_layers: The number of blocks.
        n_heads: Attention heads per block; None if the names do not contain head indices.
        attention_bias: Whether the attention projections have biases.
        final_norm: Whether a LayerNorm follows the last block.
    """

    layout: StackLayout
    root: str
    n_layers: int
    n_heads: int | None
    attention_bias: bool
    final_norm: bool

    def sources(self, layer: int, part: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the checkpoint's names for the weight and for the bias of one part of a block."""
        names, prefix = self.layout.parts[part], self.root + self.layout.block
        return self._filled(prefix, names.weight, layer), self._filled(prefix, names.bias, layer)

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the checkpoint's names for each weight of the Encoder, except the embeddings."""
        names: dict[str, tuple[str, ...]] = {}
        for layer in range(self.n_layers):
            for part in self.layout.parts:
                weight, bias = self.sources(layer, part)
                names[f"blocks.{layer}.{part}.weight"] = weight
                if bias and (self.attention_bias or part not in (QKV, OUTPUT)):
                    names[f"blocks.{layer}.{part}.bias"] = bias
        if self.final_norm:
            norm = self.layout.final_norm
            names["final_norm.weight"] = self._filled(self.root, norm.weight, 0)
            names["final_norm.bias"] = self._filled(self.root, norm.bias, 0)
        return names

    def sizes(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the fields of EncoderConfig that follow from the names and from the shapes of the first block.

        Raises:
            WeightShapeError: A weight of the first block is not a matrix, or is empty.
        """
        sizes = {"d_model": self._size(tensors, QKV, 1), "n_layers": self.n_layers, "d_ff": 0}
        if INNER in self.layout.parts:
            sizes["d_ff"] = self._size(tensors, INNER, 0)
        if self.n_heads is not None:
            sizes["n_heads"] = self.n_heads
        return sizes

    def load(
        self, config: EncoderConfig, tensors: Mapping[str, Tensor], tables: Mapping[str, tuple[str, Tensor]]
    ) -> Encoder:
        """Build the encoder.

        Args:
            config: The encoder's sizes and settings.
            tensors: The state dict. It contains every tensor that `names` lists.
            tables: The embedding and position tables, by their names in the Encoder. Each value is a pair: the name of
                the table for error messages, and the numbers of the table.

        Raises:
            WeightValueError: A tensor contains NaN or infinity, or its type is not a floating-point type.
            WeightShapeError: The shape of a tensor does not match the configuration.
        """
        names = self.names()

        def weight(target: str, shape: tuple[int, ...]) -> Tensor:
            if target in tables:
                name, values = tables[target]
                return _read_weight({name: values}, (name,), shape)
            part, _, kind = re.sub(r"^blocks\.[0-9]+\.", "", target).rpartition(".")
            transposed = kind == "weight" and part in self.layout.parts and self.layout.parts[part].transposed
            stacked = _read_weight(tensors, names[target], shape, transposed=transposed)
            if part != QKV or not self.layout.interleaved:
                return stacked
            by_head = stacked.reshape(config.n_heads, 3, config.d_k, -1)  # (heads, 3, d_k, …)
            return by_head.transpose(0, 1).reshape(shape)  # (3·d_model, …)

        return encoder_of(config, weight)

    def _size(self, tensors: Mapping[str, Tensor], part: str, axis: int) -> int:
        """Return how many outputs (axis 0) or inputs (axis 1) the first matrix of a part has."""
        name = self.sources(0, part)[0][0]
        shape = tuple(tensors[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise WeightShapeError(f"{name} must be a matrix; its shape was {shape}")
        return shape[1 - axis if self.layout.parts[part].transposed else axis]

    def _filled(self, prefix: str, templates: tuple[str, ...], layer: int) -> tuple[str, ...]:
        names = []
        for template in templates:
            heads = range(self.n_heads or 0) if "{head}" in template else (0,)
            names += [prefix + template.replace("{head}", str(head)) for head in heads]
        return tuple(name.replace("{layer}", str(layer)) for name in names)


def _read_weight(
    tensors: Mapping[str, Tensor], sources: Sequence[str], shape: tuple[int, ...], *, transposed: bool = False
) -> Tensor:
    """Return one weight of the Encoder in float32. Each source tensor fills an equal share of the first axis."""
    share = (shape[0] // len(sources), *shape[1:])
    if transposed:
        share = share[::-1]
    for name in sources:
        check_values(name, tensors[name])
        if tuple(tensors[name].shape) != share:
            raise WeightShapeError(f"{name} must have the shape {share}; was {tuple(tensors[name].shape)}")
    parts = [tensors[name].float().T if transposed else tensors[name].float() for name in sources]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
