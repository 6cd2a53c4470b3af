"""What every layout says, and how weights are put in place by it."""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from encserve_export.config import EncoderConfig
from encserve_export.encoder import Encoder
from encserve_export.errors import WeightNamesError, WeightShapeError, WeightValueError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One checkpoint, read in the terms of the Encoder.

    Attributes:
        config: The encoder's sizes and choices.
        description: For people, e.g. "BertModel".
        names: For each weight of the Encoder, the checkpoint's names for it. Several are stacked along the first axis.
        ignored: Beginnings of names that belong to no encoder: poolers, heads of tasks, buffers.
    """

    config: EncoderConfig
    description: str
    names: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...]

    def load(self, tensors: Mapping[str, Tensor]) -> Encoder:
        """Builds the encoder from the checkpoint's tensors.

        Args:
            tensors: The checkpoint's tensors by the names that `names` uses.

        Raises:
            WeightNamesError: Names are missing or unknown.
            WeightValueError: A tensor is not of floating-point numbers, or holds NaN or infinity.
            WeightShapeError: A tensor's shape does not fit the configuration.
        """
        used = [name for sources in self.names.values() for name in sources]
        self._check_names(tensors, used)
        for name in used:
            _check_values(name, tensors[name])
        encoder = Encoder(self.config)
        shapes = {name: tuple(weight.shape) for name, weight in encoder.state_dict().items()}
        encoder.load_state_dict(
            {target: _stack(tensors, sources, shapes[target]) for target, sources in self.names.items()}
        )
        return encoder.eval().requires_grad_(False)

    def _check_names(self, tensors: Mapping[str, Tensor], used: Iterable[str]) -> None:
        missing = sorted(set(used) - set(tensors))
        surplus = sorted(name for name in set(tensors) - set(used) if not name.startswith(self.ignored))
        problems = [
            f"{kind}: {', '.join(names)}" for kind, names in (("missing", missing), ("surplus", surplus)) if names
        ]
        if problems:
            raise WeightNamesError(f"the weights do not fit {self.description}; {'; '.join(problems)}")


def _check_values(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise WeightValueError(
            f"{name} must hold floating-point numbers; was {str(tensor.dtype).removeprefix('torch.')}"
        )
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise WeightValueError(f"{name} must be finite; {bad} of its {tensor.numel()} numbers are NaN or infinite")


def _stack(tensors: Mapping[str, Tensor], sources: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    """The weight of one target in float32; each source is an equal share of its first axis."""
    share = (shape[0] // len(sources), *shape[1:])
    for name in sources:
        if tuple(tensors[name].shape) != share:
            raise WeightShapeError(f"{name} must have the shape {share}; was {tuple(tensors[name].shape)}")
    return torch.cat([tensors[name].float() for name in sources])
