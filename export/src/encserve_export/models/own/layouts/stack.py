"""Layouts that names alone tell: a stack of equal blocks, wherever in the model it stands.

In a template `{layer}` is the block's number and `{head}` the attention head's, both from 0.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from encserve_export.ground.errors import WeightShapeError
from encserve_export.models.own.config import EncoderConfig, MergeHeads
from encserve_export.models.own.layouts.base import Layout, check_names

QKV, OUTPUT = "attention.qkv", "attention.output"
ATTENTION_NORM, INNER = "attention_norm", "feed_forward.inner"

_ADVICE = ". Save the encoder with all of its weights, and without those of a head, a decoder or an optimizer"


@dataclasses.dataclass(frozen=True)
class Part:
    """One linear layer or norm of the Encoder in a checkpoint.

    Attributes:
        weight: Templates of the names that make up its weight, one below the other.
        bias: The same of its bias; empty where there is none.
        transposed: Whether the weight is stored (in, out), for x @ W.
    """

    weight: tuple[str, ...]
    bias: tuple[str, ...] = ()
    transposed: bool = False


def linear(*names: str) -> Part:
    """One or several `nn.Linear`, whose outputs stand side by side."""
    return Part(tuple(f"{name}.weight" for name in names), tuple(f"{name}.bias" for name in names))


def matrix(*names: str, bias: tuple[str, ...] = ()) -> Part:
    """One or several matrices W for x @ W, whose outputs stand side by side."""
    return Part(names, bias, transposed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLayout:
    """How one family of checkpoints names its weights.

    Attributes:
        name: What `--layout` calls it.
        summary: For people, in a line.
        block: What every name of a block begins with: "layers.{layer}.", or "" where there is one block only.
        parts: The block's parts by the Encoder's names for them. Without feed-forward parts d_ff is 0, without norms
            norm is "none".
        final_norm: The LayerNorm after the last block, where a checkpoint has one.
        interleaved: Whether the rows of the one projection to Q, K and V run head by head.
        merge_heads: How the code of such checkpoints merges the heads; see `EncoderConfig`.
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
        """The template of the name by which the layout is recognised."""
        return self.block + self.parts[QKV].weight[0]

    def find_stacks(self, names: Iterable[str]) -> list["Stack"]:
        """The stacks of this layout among a checkpoint's names."""
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
        layout: Its layout.
        root: What stands before all of its names: "", or the path of the encoder in a larger model.
        n_layers: Its blocks.
        n_heads: Attention heads per block, where each has names of its own.
        attention_bias: Whether attention's projections have biases.
        final_norm: Whether a LayerNorm follows the last block.
    """

    layout: StackLayout
    root: str
    n_layers: int
    n_heads: int | None
    attention_bias: bool
    final_norm: bool

    def sources(self, layer: int, part: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of one part's weight and bias in one block."""
        where = self.layout.parts[part]
        return self._names(where.weight, layer), self._names(where.bias, layer)

    def check_names(self, tensors: Mapping[str, Tensor], tables: Iterable[str]) -> None:
        """Refuses a checkpoint that lacks weights of the stack, or holds others.

        Args:
            tensors: The state dict.
            tables: The names in it that belong to embeddings.

        Raises:
            WeightNamesError: Names are missing or unknown; the text lists all of them.
        """
        used = {name for sources in self.names().values() for name in sources}
        check_names(f"the layout {self.layout.name}", tensors, used | set(tables), advice=_ADVICE)

    def read(self, config: EncoderConfig, names: Mapping[str, tuple[str, ...]]) -> Layout:
        """The stack as a Layout.

        Args:
            config: The encoder's sizes and choices.
            names: Where the embeddings are: for each of their weights in the Encoder, the checkpoint's names.
        """
        own, transposed = self.names(), set()
        for layer in range(self.n_layers):
            transposed |= {
                f"blocks.{layer}.{part}.weight" for part, where in self.layout.parts.items() if where.transposed
            }
        interleaved = {name for name in own if f".{QKV}." in name} if self.layout.interleaved else set()
        return Layout(
            config=config,
            description=self.layout.name,
            names={**own, **names},
            transposed=frozenset(transposed),
            interleaved=frozenset(interleaved),
        )

    def names(self) -> dict[str, tuple[str, ...]]:
        """For each weight of the Encoder but the embeddings, the checkpoint's names."""
        names: dict[str, tuple[str, ...]] = {}
        for layer in range(self.n_layers):
            for part in self.layout.parts:
                weight, bias = self.sources(layer, part)
                names[f"blocks.{layer}.{part}.weight"] = weight
                if bias and (self.attention_bias or part not in (QKV, OUTPUT)):
                    names[f"blocks.{layer}.{part}.bias"] = bias
        if self.final_norm:
            for kind in ("weight", "bias"):
                names[f"final_norm.{kind}"] = self._names(getattr(self.layout.final_norm, kind), 0, block="")
        return names

    def sizes(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """The fields of EncoderConfig that shapes tell, read off the first block.

        Raises:
            WeightShapeError: A weight is no matrix.
        """
        sizes = {"d_model": self._size(tensors, QKV, 1), "n_layers": self.n_layers, "d_ff": 0}
        if INNER in self.layout.parts:
            sizes["d_ff"] = self._size(tensors, INNER, 0)
        if self.n_heads is not None:
            sizes["n_heads"] = self.n_heads
        return sizes

    def _size(self, tensors: Mapping[str, Tensor], part: str, axis: int) -> int:
        """The outputs (axis 0) or inputs (axis 1) of the first layer that makes up a part."""
        name = self.sources(0, part)[0][0]
        shape = tuple(tensors[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise WeightShapeError(f"{name} must be a matrix; its shape was {shape}")
        return shape[1 - axis if self.layout.parts[part].transposed else axis]

    def _names(self, templates: tuple[str, ...], layer: int, block: str | None = None) -> tuple[str, ...]:
        begin = self.root + (self.layout.block if block is None else block)
        names = []
        for template in templates:
            heads = range(self.n_heads or 0) if "{head}" in template else (0,)
            names += [begin + template.replace("{head}", str(head)) for head in heads]
        return tuple(name.replace("{layer}", str(layer)) for name in names)
