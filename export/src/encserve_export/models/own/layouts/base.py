"""What every layout says, and how weights are put in place by it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from encserve_export.ground.errors import WeightNamesError, WeightShapeError, WeightValueError
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder, encoder_of

_MAX_LISTED = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One checkpoint, read in the terms of the Encoder.

    Attributes:
        config: The encoder's sizes and choices.
        description: For people, e.g. "BertModel".
        names: For each weight of the Encoder, the checkpoint's names for it. Several are stacked along the first axis.
        ignored: Beginnings of names that belong to no encoder: poolers, heads of tasks, buffers.
        transposed: Weights of the Encoder whose sources are stored (in, out), for x @ W.
        interleaved: Weights of the Encoder, Q, K and V in one, whose rows run head by head: Q, K and V of the first
            head, then of the second.
        swapped: Weights of the Encoder of which the second half is stored first.
    """

    config: EncoderConfig
    description: str
    names: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()

    def load(self, tensors: Mapping[str, Tensor]) -> Encoder:
        """Builds the encoder from the checkpoint's tensors.

        Args:
            tensors: The checkpoint's tensors by the names that `names` uses.

        Raises:
            WeightNamesError: Names are missing or unknown.
            WeightValueError: A tensor is not of floating-point numbers, or holds NaN or infinity.
            WeightShapeError: A tensor's shape does not fit the configuration.
        """
        self.check_names(tensors)
        for name in self._used():
            check_values(name, tensors[name])
        return encoder_of(self.config, lambda target, shape: self._weight(tensors, target, shape))

    def check_names(self, names: Iterable[str]) -> None:
        """Refuses names of tensors that are not those of `names`.

        Raises:
            WeightNamesError: Names are missing or unknown.
        """
        check_names(self.description, names, self._used(), self.ignored)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Those of a checkpoint's names that belong to poolers and heads; buffers are nobody's loss."""
        return [name for name in names if name.startswith(self.ignored) and not name.startswith("embeddings.")]

    def _used(self) -> list[str]:
        return [name for sources in self.names.values() for name in sources]

    def _weight(self, tensors: Mapping[str, Tensor], target: str, shape: tuple[int, ...]) -> Tensor:
        """One weight of the Encoder."""
        stacked = read_weight(tensors, self.names[target], shape, transposed=target in self.transposed)
        if target in self.swapped:
            return torch.cat(stacked.chunk(2)[::-1])
        if target not in self.interleaved:
            return stacked
        by_head = stacked.reshape(self.config.n_heads, 3, self.config.d_k, -1)  # (heads, 3, d_k, …)
        return by_head.transpose(0, 1).reshape(shape)  # (3·d_model, …)


def check_names(
    description: str,
    names: Iterable[str],
    used: Iterable[str],
    ignored: tuple[str, ...] = (),
    *,
    advice: str = "",
) -> None:
    """Refuses a checkpoint whose names are not those that are needed.

    Args:
        description: What they are needed for.
        names: The checkpoint's names.
        used: The names that are needed.
        ignored: Beginnings of names that may be there.
        advice: What to do about it.

    Raises:
        WeightNamesError: Names are missing or unknown; the text lists the first of them.
    """
    missing = sorted(set(used) - set(names))
    surplus = sorted(name for name in set(names) - set(used) if not name.startswith(ignored))
    problems = [f"{kind}: {listed(names)}" for kind, names in (("missing", missing), ("surplus", surplus)) if names]
    if problems:
        raise WeightNamesError(f"the weights do not fit {description}; {'; '.join(problems)}{advice}")


def listed(names: Sequence[str]) -> str:
    """Names for an error, the first of them where there are many."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def check_values(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that holds anything but finite floating-point numbers.

    Raises:
        WeightValueError: It does; the text names it and how many.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WeightValueError(f"{name} must hold all of its numbers; was {tensor.device.type}, {tensor.layout}")
    if not tensor.is_floating_point():
        raise WeightValueError(
            f"{name} must hold floating-point numbers; was {str(tensor.dtype).removeprefix('torch.')}"
        )
    # In float32, as it is used: a float64 may be too large for that.
    bad = int((~torch.isfinite(tensor.float())).sum())
    if bad:
        raise WeightValueError(f"{name} must be finite; {bad} of its {tensor.numel()} numbers are NaN or infinite")


def read_weight(
    tensors: Mapping[str, Tensor], sources: Sequence[str], shape: tuple[int, ...], *, transposed: bool = False
) -> Tensor:
    """Return one weight of the Encoder in float32.

    Args:
        tensors: The checkpoint.
        sources: The names of its parts, equal shares of the first axis.
        shape: The shape of the whole weight.
        transposed: Whether each part is stored as (in, out).

    Raises:
        WeightShapeError: A part has another shape; the text has both.
    """
    share = (shape[0] // len(sources), *shape[1:])
    if transposed:
        share = share[::-1]
    for name in sources:
        if tuple(tensors[name].shape) != share:
            raise WeightShapeError(f"{name} must have the shape {share}; was {tuple(tensors[name].shape)}")
    parts = [tensors[name].float().T if transposed else tensors[name].float() for name in sources]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
