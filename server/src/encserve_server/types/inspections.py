"""What an inspection gives."""

from dataclasses import dataclass
from enum import Enum

from encserve_server.types.arrays import Numbers


class InspectKind(Enum):
    """What one tensor of an inspection holds; the values are those of the protobuf enum of the same name."""

    ATTENTION_WEIGHTS = 1
    HIDDEN_STATES = 2
    POSITIONS = 3


@dataclass(frozen=True, slots=True)
class InspectTensor:
    """One tensor of an inspection.

    Attributes:
        kind: What it holds.
        layers: The layers along its first axis; empty for positions.
        parts: Its numbers, float32: an array for each layer, or one array.
    """

    kind: InspectKind
    layers: tuple[int, ...]
    parts: tuple[Numbers, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (len(self.layers), *self.parts[0].shape) if self.layers else self.parts[0].shape
