"""One message of a call, and cutting it in two."""

from collections.abc import Sequence
from dataclasses import dataclass

from encserve_proto.v1 import encoder_pb2 as pb

Request = pb.EncodeRequest | pb.InspectRequest | pb.GetModelRequest | pb.ListModelsRequest


@dataclass(slots=True, eq=False)
class Message:
    """One request and where its inputs belong.

    Attributes:
        request: The request.
        first_index: The index of its first input among the caller's.
        attempts: How often it has been sent; only `Dispatch` counts it up.
    """

    request: Request
    first_index: int = 0
    attempts: int = 0

    @property
    def n_inputs(self) -> int:
        """How many inputs it holds."""
        return len(self.request.inputs) if isinstance(self.request, pb.EncodeRequest) else 0

    def halves(self) -> "list[Message]":
        """The same inputs in two messages; none where there is one input or no inputs at all."""
        if not isinstance(self.request, pb.EncodeRequest) or self.n_inputs < 2:
            return []
        inputs, middle = self.request.inputs, self.n_inputs // 2
        return [
            Message(request_like(self.request, inputs[:middle]), self.first_index),
            Message(request_like(self.request, inputs[middle:]), self.first_index + middle),
        ]


def request_like(template: pb.EncodeRequest, inputs: Sequence[pb.Input]) -> pb.EncodeRequest:
    """A request with other inputs."""
    return pb.EncodeRequest(
        model=template.model,
        model_version=template.model_version,
        options=template.options,
        expected_fingerprint=template.expected_fingerprint,
        inputs=inputs,
    )
