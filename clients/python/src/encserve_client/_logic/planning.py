"""A call cut into messages that a server accepts. Pure.

Token ids and vectors are counted exactly. A text's tokens are not known here: they are estimated as what texts
typically have, so that messages do not become tiny for fear of a worst case that rarely comes. Where the estimate was
too low the server refuses the message before computing anything, and the caller of this module sends its halves.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from encserve_client.exceptions import InvalidInputError
from encserve_client.inputs import Input, Spanned, check_input, pack_input
from encserve_client.options import Options, Output, numpy_dtype
from encserve_client.results import ModelInfo
from encserve_proto.v1 import encoder_pb2 as pb

Request = pb.EncodeRequest | pb.TokenizeRequest | pb.InspectRequest | pb.GetModelRequest | pb.ListModelsRequest

# Of a message, unless one sequence has more. Four of these take BERT-large on two CPUs 45 s and on four 23 s; less than
# this would leave a fast server waiting for the next.
MOST_TOKENS = 4096
# A call of more messages is a job, which lets others go first.
INTERACTIVE_MESSAGES = 2
# Room for what a message holds beside its inputs or rows: names, options, timings, framing.
_MESSAGE_OVERHEAD_BYTES = 4096
_INPUT_OVERHEAD_BYTES = 8
_SEQUENCE_INFO_BYTES = 32
# A text's id, start and end as varints and its special flag; then a vocabulary string.
_TEXT_TOKEN_INFO_BYTES = 12
_TOKEN_STRING_BYTES = 16
# English has about 4.5 bytes a token, Chinese about 3, code in between.
_TEXT_BYTES_PER_TOKEN = 3
_TEXT_SPECIAL_TOKENS = 2
# Models of sparse weights have some hundred of them for a long text.
_ACTIVE_DIMS = 1024


@dataclass(slots=True, eq=False)
class Message:
    """One request and where its inputs belong.

    Attributes:
        request: The request.
        first_index: The index of its first input among the caller's.
        attempts: How often it has been sent; only `Dispatch` counts it up.
        deadline: When its answer must have come; set by `Dispatch` when it is first sent.
    """

    request: Request
    first_index: int = 0
    attempts: int = 0
    deadline: float = math.inf

    @property
    def n_inputs(self) -> int:
        """How many inputs it holds."""
        if isinstance(self.request, pb.TokenizeRequest):
            return len(self.request.texts)
        return len(self.request.inputs) if isinstance(self.request, pb.EncodeRequest) else 0

    def seconds_left(self, now: float) -> float | None:
        """Return the time until the deadline for gRPC, at least 1 ms. Return None without a deadline."""
        return None if math.isinf(self.deadline) else max(self.deadline - now, 0.001)

    def halves(self) -> "list[Message]":
        """The same inputs in two messages; none where there is one input or no inputs at all."""
        middle = self.n_inputs // 2
        return [*self._part(0, middle), *self._part(middle, self.n_inputs)] if middle else []

    def without(self, place: int) -> "list[Message]":
        """The same inputs but for one, in two messages at most."""
        return [*self._part(0, place), *self._part(place + 1, self.n_inputs)]

    def _part(self, start: int, end: int) -> "list[Message]":
        """One message with the inputs of these places; none for no inputs."""
        if start >= end:
            return []
        part: Request = self.request
        if isinstance(part, pb.TokenizeRequest):
            part = tokenize_request_like(part, part.texts[start:end])
        elif isinstance(part, pb.EncodeRequest):
            part = request_like(part, part.inputs[start:end])
        return [Message(part, self.first_index + start)]


def tokenize_request_like(template: pb.TokenizeRequest, texts: Sequence[str]) -> pb.TokenizeRequest:
    """A request with other texts."""
    request = pb.TokenizeRequest(
        model=template.model,
        model_version=template.model_version,
        texts=texts,
        task=template.task,
        truncation=template.truncation,
        include_token_strings=template.include_token_strings,
        offset_unit=template.offset_unit,
    )
    if template.HasField("prompt_name"):
        request.prompt_name = template.prompt_name
    return request


def request_like(template: pb.EncodeRequest, inputs: Sequence[pb.Input]) -> pb.EncodeRequest:
    """A request with other inputs."""
    return pb.EncodeRequest(
        model=template.model,
        model_version=template.model_version,
        options=template.options,
        expected_fingerprint=template.expected_fingerprint,
        expected_space_id=template.expected_space_id,
        priority=template.priority,
        inputs=inputs,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may hold.

    Attributes:
        max_sequences: Inputs.
        max_tokens: Tokens, special tokens included.
        max_request_bytes: Bytes of the request.
        max_response_bytes: Bytes of the answer.
        max_sequence_tokens: Tokens of one sequence.
        d_model: Numbers in a row of the answer.
        vector_width: Numbers in a row of "model" pooling, where that is another number; else 0.
        multi_vector_width: Numbers in a vector of "multi_vector"; 0 where there are none.
    """

    max_sequences: int
    max_tokens: int
    max_request_bytes: int
    max_response_bytes: int
    max_sequence_tokens: int
    d_model: int
    vector_width: int = 0
    multi_vector_width: int = 0

    @classmethod
    def of(cls, info: ModelInfo, max_message_bytes: int, max_concurrent_messages: int) -> "Limits":
        """The limits for one of so many concurrent messages.

        A message may have as many tokens as the server's whole queue. Each gets its share of that, so that a call does
        not fill the queue against itself, and no more than a slow server computes within a message's time.
        """
        request_bytes = min(max_message_bytes, info.max_request_bytes or max_message_bytes)
        response_bytes = min(max_message_bytes, info.max_response_bytes or max_message_bytes)
        sequence_tokens = info.max_sequence_tokens or 2**31
        return cls(
            max_sequences=info.max_request_sequences or 2**31,
            max_tokens=min(max((info.max_request_tokens or 2**63) // max_concurrent_messages, 1), MOST_TOKENS),
            max_request_bytes=max(request_bytes - _MESSAGE_OVERHEAD_BYTES, 1),
            max_response_bytes=max(response_bytes - _MESSAGE_OVERHEAD_BYTES, 1),
            max_sequence_tokens=sequence_tokens,
            d_model=info.d_model,
            vector_width=info.default_dimensions or info.vector_width,
            multi_vector_width=info.multi_vector_width,
        )


@dataclass(slots=True)
class Cost:
    """What inputs take of a message's limits."""

    sequences: int = 0
    tokens: int = 0
    request_bytes: int = 0
    response_bytes: int = 0

    def plus(self, other: "Cost") -> "Cost":
        """Both together."""
        return Cost(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.request_bytes + other.request_bytes,
            self.response_bytes + other.response_bytes,
        )

    def fits(self, limits: Limits) -> bool:
        """Whether one message may hold it."""
        return (
            self.sequences <= limits.max_sequences
            and self.tokens <= limits.max_tokens
            and self.request_bytes <= limits.max_request_bytes
            and self.response_bytes <= limits.max_response_bytes
        )


def plan_messages(
    inputs: Sequence[Input | Spanned],
    template: pb.EncodeRequest,
    options: Options,
    limits: Limits,
) -> Iterator[Message]:
    """Cuts inputs into messages: each input once, in order, each message within the limits, none needlessly small.

    An input that is over the limits alone gets a message of its own, for the server to judge. Messages are made as
    they are asked for.

    Args:
        inputs: What should be inputs.
        template: A request with everything but the inputs.
        options: The same options as in the template.
        limits: What one message may hold.

    Raises:
        InvalidInputError: An input is of the wrong type.
    """
    builder = MessageBuilder(template, options, limits)
    for index, item in enumerate(inputs):
        if (full := builder.add(index, item)) is not None:
            yield full
    if (last := builder.flush()) is not None:
        yield last


class MessageBuilder:
    """Gathers the inputs of a call into messages within the limits."""

    def __init__(self, template: pb.EncodeRequest, options: Options, limits: Limits) -> None:
        """Create a builder. `template` is a request without inputs; `options` are the options in the template."""
        self._template = template
        self._options = options
        self._limits = limits
        self._packed: list[pb.Input] = []
        self._first_index = 0
        self._total = Cost()

    @property
    def is_empty(self) -> bool:
        """Whether no input was added since the last message."""
        return not self._packed

    @property
    def is_full(self) -> bool:
        """Whether the message has as many inputs as one message may have."""
        return self._total.sequences >= self._limits.max_sequences

    def add(self, index: int, item: object) -> Message | None:
        """Add the input with this index. Return the previous message if the input begins a new message.

        Raises:
            InvalidInputError: `item` is not an input. The error has the index, and the builder does not change.
        """
        name = f"inputs[{index}]"
        try:
            packed = pack_input(item if isinstance(item, Spanned) else check_input(item, name), name)
        except InvalidInputError as error:
            error.index = index
            raise
        total = self._total.plus(cost := cost_of(packed, self._options, self._limits))
        full = None
        # The inputs of a message have consecutive indices, so the first index gives the index of each.
        if self._packed and (index != self._first_index + len(self._packed) or not total.fits(self._limits)):
            full, total = self.flush(), cost
        if not self._packed:
            self._first_index = index
        self._packed.append(packed)
        self._total = total
        return full

    def flush(self) -> Message | None:
        """Return the message with the inputs that were added since the last message. Return None without inputs."""
        if not self._packed:
            return None
        message = Message(request_like(self._template, self._packed), self._first_index)
        self._packed, self._total = [], Cost()
        return message


def as_bulk(messages: Iterator[Message], template: pb.EncodeRequest) -> Iterator[Message]:
    """Says of more than `INTERACTIVE_MESSAGES` messages that they are bulk.

    Args:
        messages: The messages of a call.
        template: What they are made of, as they are asked for; it becomes bulk as well.
    """
    first = list(islice(messages, INTERACTIVE_MESSAGES + 1))
    if len(first) > INTERACTIVE_MESSAGES:
        template.priority = pb.PRIORITY_BULK
        for message in first:
            if isinstance(message.request, pb.EncodeRequest):
                message.request.priority = pb.PRIORITY_BULK
    return chain(first, messages)


def plan_texts(texts: Sequence[str], template: pb.TokenizeRequest, limits: Limits) -> Iterator[Message]:
    """Cuts texts into messages for the tokenizer, as `plan_messages` does inputs.

    Raises:
        InvalidInputError: A text is no Unicode.
    """
    packed: list[str] = []
    first_index, total = 0, Cost()
    for index, text in enumerate(texts):
        size = pack_input(text, f"texts[{index}]").ByteSize() + _INPUT_OVERHEAD_BYTES
        token_bytes = _TEXT_TOKEN_INFO_BYTES + (_TOKEN_STRING_BYTES if template.include_token_strings else 0)
        # A token has a byte at least, and mostly more: a message that is too large all the same is halved.
        cost = Cost(1, 0, size, _SEQUENCE_INFO_BYTES + size // _TEXT_BYTES_PER_TOKEN * token_bytes)
        if packed and not total.plus(cost).fits(limits):
            yield Message(tokenize_request_like(template, packed), first_index)
            packed, first_index, total = [], index, Cost()
        packed.append(text)
        total = total.plus(cost)
    if packed:
        yield Message(tokenize_request_like(template, packed), first_index)


def cost_of(message: pb.Input, options: Options, limits: Limits) -> Cost:
    """What one input takes: exact for token ids and vectors, an estimate for text."""
    request_bytes = message.ByteSize() + _INPUT_OVERHEAD_BYTES
    is_text = message.HasField("text")
    tokens = min(tokens_of(message), limits.max_sequence_tokens)
    spans = len(message.spans.starts)
    numbers = sum(_numbers_of(output, tokens, spans, limits) for output in options.outputs)
    info_bytes = _SEQUENCE_INFO_BYTES
    if options.tells_tokens:
        info_bytes += tokens * (
            (_TEXT_TOKEN_INFO_BYTES if is_text else int(options.exclude_special_tokens))
            + (_TOKEN_STRING_BYTES if options.include_token_strings else 0)
        )
    return Cost(1, tokens, request_bytes, numbers * options.numpy_dtype.itemsize + info_bytes)


def _numbers_of(output: Output, tokens: int, spans: int, limits: Limits) -> int:
    """What an input of so many tokens and spans has in an output, indices counted as numbers."""
    if output.kind == "spans":
        return (output.dimensions or limits.d_model) * spans
    if output.kind == "sparse":
        return 2 * (output.max_active_dims or _ACTIVE_DIMS)
    if output.kind == "multi_vector":
        return (1 + (output.dimensions or limits.multi_vector_width or limits.d_model)) * tokens
    its_own = limits.vector_width if output.kind == "model" else 0
    return (output.dimensions or its_own or limits.d_model) * (1 if output.is_pooled else tokens)


def tokens_of(message: pb.Input) -> int:
    """The tokens of one input: exact for token ids and vectors, an estimate for text."""
    if message.HasField("text"):
        return (message.ByteSize() + _INPUT_OVERHEAD_BYTES) // _TEXT_BYTES_PER_TOKEN + _TEXT_SPECIAL_TOKENS
    if message.HasField("embeddings"):
        vectors = message.embeddings
        return len(vectors.data) // (vectors.width * numpy_dtype(vectors.data_type).itemsize)
    return len(message.token_ids.ids)
