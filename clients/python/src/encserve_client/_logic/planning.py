"""Split a call into messages that the server accepts. Without I/O.

The number of tokens is exact for token ids and vectors. For texts, the number is an estimate of the typical case,
because the worst case would make messages tiny. If the estimate was too low, the server refuses the message before any
computation, and `Dispatch` splits the message. The same holds for a reply over the server's limit. But the reply limit
of this client is checked only by gRPC, after the computation. So the expected size of the rows limits a message too.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

from encserve_client.exceptions import EncserveError, InvalidInputError
from encserve_client.inputs import Input, SpanInput, check_input, pack_input
from encserve_client.options import Options, numpy_dtype
from encserve_client.results import ModelInfo
from encserve_proto.v1 import encoder_pb2 as pb

Request = (
    pb.EncodeRequest
    | pb.TokenizeRequest
    | pb.ScoreRequest
    | pb.InspectRequest
    | pb.GetModelRequest
    | pb.ListModelsRequest
)

# The largest number of tokens of a message with several inputs. BERT-large computes four such messages in 45 s on two
# CPUs, and in 23 s on four. With smaller messages, a fast server would wait for the client.
MAX_MESSAGE_TOKENS = 4096
# A call of more messages than this gets the priority "bulk".
INTERACTIVE_MESSAGES = 2
# Bytes of a message besides the inputs: names, options, framing.
_MESSAGE_OVERHEAD_BYTES = 4096
_INPUT_OVERHEAD_BYTES = 8
_INDEX_BYTES = 4
# English has about 4.5 bytes per token, Chinese about 3, and code has a number in between.
_TEXT_BYTES_PER_TOKEN = 3
_TEXT_SPECIAL_TOKENS = 2


@dataclass(slots=True, eq=False)
class Message:
    """One request, with the state of its attempts.

    Attributes:
        request: The request.
        indices: The caller's index of each input, ascending. Empty for a request without inputs.
        attempts: How often the message was sent. Only `Dispatch` changes the number.
        deadline: The deadline of the answer. `Dispatch` sets the deadline at the first attempt.
        last_failure: The text of the failure before a retry; "" without one.
    """

    request: Request
    indices: Sequence[int] = ()
    attempts: int = 0
    deadline: float = math.inf
    last_failure: str = ""

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """Prefixes of field names in the .proto file that the arguments of a call lack.

        Each prefix comes with its replacement. Example: ("inputs[0].spans", "spans").
        """
        request = self.request
        if not isinstance(request, pb.EncodeRequest):
            return []
        arguments = [("outputs[0].", "")] if len(request.options.outputs) == 1 else []
        if request.inputs and request.inputs[0].HasField("spans"):
            arguments += [("inputs[0].spans", "spans"), ("inputs[0]", "text")]
        return arguments

    def halves(self) -> "list[Message]":
        """Split the inputs into two messages. Return [] for at most one input."""
        positions = range(len(self.indices))
        middle = len(positions) // 2
        return [self._only(positions[:middle]), self._only(positions[middle:])] if middle else []

    def without(self, positions: Collection[int]) -> "list[Message]":
        """Return one message with the inputs at all other positions, or no message if there are none."""
        rest = [position for position in range(len(self.indices)) if position not in positions]
        return [self._only(rest)] if rest else []

    def _only(self, positions: Sequence[int]) -> "Message":
        inputs = getattr(self.request, _inputs_field(self.request))
        if isinstance(inputs, pb.RaggedTensor):
            chosen = request_like(self.request, tensor_at(inputs, positions))
        else:
            chosen = request_like(self.request, [inputs[position] for position in positions])
        return Message(chosen, [self.indices[position] for position in positions])


def tensor_at(tensor: pb.RaggedTensor, positions: Sequence[int]) -> pb.RaggedTensor:
    """Return a copy of a tensor of float rows with the sequences at these positions only."""
    row_bytes = tensor.width * numpy_dtype(tensor.data_type).itemsize
    ends = list(accumulate(tensor.lengths, initial=0))  # the first row of each sequence, and the number of rows
    rows = [(ends[position], ends[position + 1]) for position in positions]
    return pb.RaggedTensor(
        kind=tensor.kind,
        data_type=tensor.data_type,
        width=tensor.width,
        lengths=[end - begin for begin, end in rows],
        data=b"".join(_slices(tensor.data, rows, row_bytes)),
        indices=b"".join(_slices(tensor.indices, rows, _INDEX_BYTES)),
    )


def _slices(data: bytes, rows: Sequence[tuple[int, int]], row_bytes: int) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[begin * row_bytes : end * row_bytes] for begin, end in rows)


def request_like(template: Request, inputs: Sequence[Any] | pb.RaggedTensor, field: str = "") -> Request:
    """Return a copy of a request with other inputs. The old inputs are not copied.

    `field` is the field of the inputs. Default: the field of the inputs of `template`.
    """
    fields: dict[str, Any] = {its.name: value for its, value in template.ListFields()}
    fields[field or _inputs_field(template)] = inputs
    return type(template)(**fields)


def _inputs_field(request: Request) -> str:
    """Return the name of the repeated field with the inputs."""
    if isinstance(request, pb.ScoreRequest):
        if request.HasField("document_vectors"):
            return "document_vectors"
        return next(name for name in ("documents", "pairs", "texts") if getattr(request, name))
    return "texts" if isinstance(request, pb.TokenizeRequest) else "inputs"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one message.

    Attributes:
        max_sequences: Largest number of inputs.
        max_tokens: Largest number of tokens, special tokens included.
        max_request_bytes: Largest size of the request, in bytes.
        max_sequence_tokens: Largest number of tokens of one input.
    """

    max_sequences: int
    max_tokens: int
    max_request_bytes: int
    max_sequence_tokens: int

    @classmethod
    def of(
        cls, info: ModelInfo, max_message_bytes: int, max_concurrent_messages: int, token_bytes: int = 0
    ) -> "Limits":
        """Return the limits of one message in a call with `max_concurrent_messages`.

        `token_bytes`: the size of the rows of one token in the reply, see `reply_bytes_per_token`.

        The server allows a message to fill the whole queue. The concurrent messages of a call share this number of
        tokens. Otherwise the call would compete with itself. `MAX_MESSAGE_TOKENS` is a second limit. With this limit a
        slow server answers within the time of a message.
        """
        request_bytes = min(max_message_bytes, info.max_request_bytes or max_message_bytes)
        reply_bytes = min(max_message_bytes, info.max_response_bytes or max_message_bytes) - _MESSAGE_OVERHEAD_BYTES
        reply_tokens = reply_bytes // token_bytes if token_bytes else 2**63
        share = (info.max_request_tokens or 2**63) // max_concurrent_messages
        return cls(
            max_sequences=info.max_request_sequences or 2**31,
            max_tokens=min(max(min(share, reply_tokens), 1), MAX_MESSAGE_TOKENS),
            max_request_bytes=max(request_bytes - _MESSAGE_OVERHEAD_BYTES, 1),
            max_sequence_tokens=info.max_sequence_tokens or 2**31,
        )


def reply_bytes_per_token(info: ModelInfo, options: Options) -> int:
    """Return the size of the rows and indices of one token in a reply, in bytes; 0 without rows of tokens."""
    return sum(
        options.columns(info.width(output)) * options.numpy_dtype.itemsize + _INDEX_BYTES
        for output in options.outputs
        if output.kind in ("tokens", "multi_vector")
    )


def plan_messages(
    inputs: Sequence[Input | SpanInput],
    template: pb.EncodeRequest | pb.TokenizeRequest,
    limits: Limits,
    rejected: dict[int, EncserveError] | None = None,
) -> Iterator[Message]:
    """Yield messages with all inputs in order. Each message is as large as the limits allow.

    An input that is over the limits gets a separate message, because only the server knows the exact size.

    Args:
        inputs: The inputs. Without `rejected`, each input must have passed the checks of its type.
        template: A request without inputs.
        limits: The limits of one message.
        rejected: If given, has the error of each refused input, by index, and gets the error of each invalid input.
            These inputs are in no message.

    Raises:
        InvalidInputError: An input is invalid, and `rejected` is None.
    """
    builder = MessageBuilder(template, limits)
    for index, item in enumerate(inputs):
        if rejected and index in rejected:
            continue
        try:
            full = builder.add(index, item if rejected is None else check_input(item, f"inputs[{index}]"))
        except InvalidInputError as error:
            error.index = index
            if rejected is None:
                raise
            rejected[index] = error
            continue
        if full is not None:
            yield full
    if (last := builder.flush()) is not None:
        yield last


class MessageBuilder:
    """Groups the inputs of a call into messages within the limits."""

    def __init__(self, template: pb.EncodeRequest | pb.TokenizeRequest, limits: Limits) -> None:
        """Create a builder. `template` is a request without inputs."""
        self._template = template
        self._field = "texts" if isinstance(template, pb.TokenizeRequest) else "inputs"
        self._limits = limits
        self._packed: list[pb.Input | str] = []
        self._indices: list[int] = []
        self._tokens = 0
        self._request_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no input was added since the last message."""
        return not self._packed

    @property
    def is_full(self) -> bool:
        """Whether the message has the largest allowed number of inputs."""
        return len(self._packed) >= self._limits.max_sequences

    def add(self, index: int, item: Input | SpanInput) -> Message | None:
        """Add the input with this index. If the input begins a new message, return the previous message.

        Raises:
            InvalidInputError: The input cannot be sent, see `pack_input`. The builder does not change.
        """
        packed = pack_input(item, f"{self._field}[{index}]")
        tokens, request_bytes = cost_of(packed, self._limits)
        limits, full = self._limits, None
        if (
            self._tokens + tokens > limits.max_tokens
            or self._request_bytes + request_bytes > limits.max_request_bytes
            or len(self._packed) >= limits.max_sequences
        ):
            full = self.flush()
        self._packed.append(packed if self._field == "inputs" else packed.text)
        self._indices.append(index)
        self._tokens += tokens
        self._request_bytes += request_bytes
        return full

    def flush(self) -> Message | None:
        """Return a message with all inputs added since the last message, or None without inputs."""
        if not self._packed:
            return None
        message = Message(request_like(self._template, self._packed), self._indices)
        self._packed, self._indices, self._tokens, self._request_bytes = [], [], 0, 0
        return message


def as_bulk(messages: Iterator[Message], template: pb.EncodeRequest | pb.ScoreRequest) -> Iterator[Message]:
    """Set the priority "bulk" if the call has more than `INTERACTIVE_MESSAGES` messages.

    Args:
        messages: The messages of a call. The iterator copies `template` for each message.
        template: The template of the messages. The priority of the template changes too.
    """
    first = list(islice(messages, INTERACTIVE_MESSAGES + 1))
    if len(first) > INTERACTIVE_MESSAGES:
        template.priority = pb.PRIORITY_BULK
        for message in first:
            if isinstance(message.request, pb.EncodeRequest | pb.ScoreRequest):
                message.request.priority = pb.PRIORITY_BULK
    return chain(first, messages)


def cost_of(message: pb.Input, limits: Limits) -> tuple[int, int]:
    """Return the tokens and the bytes of one input. The tokens of a text are an estimate, other tokens are exact."""
    request_bytes = message.ByteSize() + _INPUT_OVERHEAD_BYTES
    if message.HasField("text"):
        tokens = tokens_of_bytes(request_bytes)
    elif message.HasField("embeddings"):
        vectors = message.embeddings
        tokens = len(vectors.data) // (vectors.width * numpy_dtype(vectors.data_type).itemsize)
    else:
        tokens = len(message.token_ids.ids)
    return min(tokens, limits.max_sequence_tokens), request_bytes


def tokens_of_bytes(size: int) -> int:
    """Return an estimate of the number of tokens of a text of this size in bytes."""
    return size // _TEXT_BYTES_PER_TOKEN + _TEXT_SPECIAL_TOKENS
