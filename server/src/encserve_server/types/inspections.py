"""The result of an inspection of a model."""

from dataclasses import dataclass
from enum import Enum

from encserve_server.types.arrays import Numbers


class InspectKind(Enum):
    """The content of an inspection tensor. The protobuf enum of the same name has the same values."""

    ATTENTION_WEIGHTS = 1
    HIDDEN_STATES = 2
    POSITIONS = 3


@dataclass(frozen=True, slots=True)
class InspectTensor:
    """One tensor of an inspection.

    Attributes:
        kind: The content.
        layers: The layer indices, in the order of the first axis; empty for positions.
        parts: A float32 array for each layer; for positions, one array.
    """

    kind: InspectKind
    layers: tuple[int, ...]
    parts: tuple[Numbers, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return (len(self.layers), *self.parts[0].shape) if self.layers else self.parts[0].shape
