"""Decodes requests of encserve.v1 from protobuf, and encodes replies."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.endpoints.status import status_of
from encserve_server.errors import InvalidField
from encserve_server.failures import Failure
from encserve_server.models.inputs import SentIds, SentInput, SentVectors
from encserve_server.models.offsets import utf8_offsets
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.scoring import score_method
from encserve_server.models.served import EncodeReply, ServedModel, TokenizeCall, TokenizeReply
from encserve_server.models.spans import SentSpans
from encserve_server.models.treatment import EncodeCall
from encserve_server.outputs import FLOAT_TYPES, MAX_OUTPUTS, OutputSpec
from encserve_server.protocols.wire import Buffer, field, join
from encserve_server.types.arrays import IndexedRows
from encserve_server.types.bundles import ModelPooling, TaskSettings
from encserve_server.types.callers import Priority
from encserve_server.types.requests import DataType, Detail, OffsetUnit, OutputKind, Task
from encserve_server.types.sequences import TokenSequence

E = TypeVar("E")

# The numbers of the protobuf fields that this module writes itself, without the protobuf library; see `wire`.
_OUTPUTS = pb.EncodeResponse.OUTPUTS_FIELD_NUMBER
_DATA = pb.RaggedTensor.DATA_FIELD_NUMBER
_INDICES = pb.RaggedTensor.INDICES_FIELD_NUMBER
_RESPONSE = pb.EncodeStreamResponse.RESPONSE_FIELD_NUMBER

# Enum values by their numbers in a request; 0 is the default. A lookup in the protobuf descriptors would take 10 µs.
_OUTPUT_KINDS = {0: OutputKind.TOKENS} | {kind.value: kind for kind in OutputKind}
_OUTPUT_KIND_NAMES = {kind: pb.OutputKind.Name(kind.value) for kind in OutputKind}
_SPAN_POOLINGS: dict[int, OutputKind | None] = {0: None} | {kind.value: kind for kind in OutputKind}
_DATA_TYPES = {0: DataType.FLOAT32} | {data_type.value: data_type for data_type in DataType}
_DATA_TYPE_NAMES = {data_type: pb.DataType.Name(data_type.value) for data_type in DataType}
_OFFSET_UNITS = {0: OffsetUnit.CODE_POINTS} | {unit.value: unit for unit in OffsetUnit}
_DETAILS: dict[int, Detail | None] = {0: None} | {detail.value: detail for detail in Detail}
_TASKS = {task.value: task for task in Task}
_PRIORITIES: dict[int, Priority] = {
    pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BULK: Priority.BULK,
}
_TRUNCATES: dict[int, bool] = {pb.TRUNCATION_UNSPECIFIED: False, pb.TRUNCATION_REFUSE: False, pb.TRUNCATION_END: True}

# The limits of the cache of decoded EncodeOptions. Callers send few different options, and each takes few bytes.
_MAX_CACHED_OPTIONS = 256
_MAX_CACHED_OPTIONS_BYTES = 1024
# Copying this many token ids takes 0.7 ms. After each such copy, the event loop runs other calls.
_TURN_NUMBERS = 16_384
# Pooling takes memory for each span. Without this limit, a few inputs could use all memory.
_MAX_SPANS = 16_384


def decode_enum(name: str, value: int, values: Mapping[int, E], enum: Any) -> E:
    """Return the value for the number of an enum.

    Raises:
        InvalidField: This server does not know the number.
    """
    if value not in values:
        last = max(enum.values())
        raise InvalidField(name, f"must be a value of {enum.DESCRIPTOR.name}, 0 to {last}; was {value}")
    return values[value]


def decode_truncation(name: str, value: int) -> bool:
    """Return whether the server may truncate inputs."""
    return decode_enum(name, value, _TRUNCATES, pb.Truncation)


def decode_task(name: str, value: int) -> Task:
    """Return the task of the texts."""
    return decode_enum(name, value, _TASKS, pb.Task)


def decode_priority(value: int) -> Priority:
    """Return the priority of a request."""
    return decode_enum("priority", value, _PRIORITIES, pb.Priority)


def decode_float_type(name: str, value: int) -> DataType:
    """Return the type of floating-point numbers. Refuse int8 and binary."""
    data_type = decode_enum(name, value, _DATA_TYPES, pb.DataType)
    if data_type not in FLOAT_TYPES:
        raise InvalidField(name, f"{_DATA_TYPE_NAMES[data_type]} is only for outputs of Encode")
    return data_type


def check_counts(request: pb.EncodeRequest, model: ServedModel) -> int:
    """Check the counts of inputs, spans and outputs before any data is copied; see `ServedModel.check_counts`.

    Returns:
        The number of inputs with spans.
    """
    inputs, outputs = len(request.inputs), len(request.options.outputs)
    if inputs > model.limits.max_sequences or outputs > MAX_OUTPUTS:  # too many for the loop below
        model.check_counts(inputs, outputs)
    spans = inputs_with_spans = 0
    for i, it in enumerate(request.inputs):
        if it.HasField("spans"):
            inputs_with_spans += 1
            spans += _count_spans(f"inputs[{i}].spans", it)
    model.check_counts(inputs, outputs, spans)
    return inputs_with_spans


def _count_spans(name: str, it: pb.Input) -> int:
    count = len(it.spans.starts)
    if count > _MAX_SPANS:
        raise InvalidField(f"{name}.starts", f"must be at most {_MAX_SPANS}; was {count}")
    if len(it.spans.ends) != count:
        raise InvalidField(f"{name}.ends", f"must have as many values as starts, {count}; was {len(it.spans.ends)}")
    return count


async def decode_call(request: pb.EncodeRequest, longest: int, inputs_with_spans: int) -> EncodeCall:
    """Decode a request that passed `check_counts`, and fill in the defaults. The event loop runs other calls meanwhile.

    Args:
        request: The request.
        longest: The maximum number of tokens to copy from each input. A request of a few MiB may hold a million ids.
        inputs_with_spans: The result of `check_counts`.

    Raises:
        InvalidField: An enum has a value that this server does not know, or an input is empty or malformed.
    """
    data = request.options.SerializeToString()
    decode = decode_options if len(data) <= _MAX_CACHED_OPTIONS_BYTES else decode_options.__wrapped__
    options = decode(data)
    inputs: list[SentInput] = []
    numbers = 0
    for i, it in enumerate(request.inputs):
        inputs.append(decode_input(f"inputs[{i}]", it, longest))
        numbers += len(it.token_ids.ids)
        if numbers > _TURN_NUMBERS:
            numbers = 0
            await asyncio.sleep(0)
    spans = _decode_spans(request.inputs, options.outputs) if inputs_with_spans else ()
    return EncodeCall(
        inputs,
        options.outputs,
        options.truncate,
        options.prompt_name,
        options.task,
        spans,
        options.shape,
        priority=decode_priority(request.priority),
    )


class Options(NamedTuple):
    """The decoded fields of EncodeOptions; see `EncodeCall`."""

    outputs: tuple[OutputSpec, ...]
    truncate: bool
    prompt_name: str | None
    task: Task
    shape: ReplyShape


@lru_cache(_MAX_CACHED_OPTIONS)
def decode_options(data: bytes) -> Options:
    """Decode the bytes of EncodeOptions. Results are cached, because callers send the same options again and again.

    Raises:
        InvalidField: An enum has a value that this server does not know.
    """
    options = pb.EncodeOptions.FromString(data)
    data_type = decode_enum("options.data_type", options.data_type, _DATA_TYPES, pb.DataType)
    outputs = [_decode_output(f"options.outputs[{i}]", it, data_type) for i, it in enumerate(options.outputs)]
    return Options(
        tuple(outputs) or (OutputSpec(OutputKind.TOKENS, data_type=data_type),),
        decode_truncation("options.truncation", options.truncation),
        options.prompt_name if options.HasField("prompt_name") else None,
        decode_task("options.task", options.task),
        _decode_shape(options),
    )


def decode_tokenize_call(request: pb.TokenizeRequest) -> TokenizeCall:
    """Decode a request, and fill in the defaults. `ServedModel.tokenize` checks the texts.

    Raises:
        InvalidField: An enum has a value that this server does not know, or that Tokenize does not accept.
    """
    return TokenizeCall(
        texts=request.texts,
        truncate=decode_truncation("truncation", request.truncation) if request.truncation else None,
        include_token_strings=request.include_token_strings,
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        task=decode_task("task", request.task),
        offset_unit=_decode_offset_unit("offset_unit", request.offset_unit),
    )


def encode_reply(model: ServedModel, call: EncodeCall, stream_request_id: str | None, reply: EncodeReply) -> bytes:
    """Return the bytes of an EncodeResponse. With a stream's request id, return an EncodeStreamResponse instead."""
    bundle, shape = model.bundle, call.shape
    queue_seconds, compute_seconds = reply.seconds()
    response = pb.EncodeResponse(
        model=bundle.name,
        model_version=bundle.version,
        fingerprint=bundle.fingerprint,
        space_id=bundle.space_id,
        timings=pb.Timings(
            tokenize_seconds=reply.tokenize_seconds,
            queue_seconds=queue_seconds,
            compute_seconds=compute_seconds,
        ),
    )
    for sequence, sent in zip(reply.sequences, call.inputs, strict=True):
        info = response.sequences.add()
        if reply.detail is not Detail.NONE:
            fill_counts(info, sequence)
        if reply.detail is Detail.TOKENS:
            text = sent if isinstance(sent, str) else None
            fill_tokens(info, sequence, model, shape.with_strings, text, shape.offset_unit)
    parts: list[Buffer] = [response.SerializeToString()]
    for i in range(len(reply.plan.outputs)):
        parts += field(_OUTPUTS, _encode_output(reply, i, shape))
    if stream_request_id is not None:
        wrapper = pb.EncodeStreamResponse(request_id=stream_request_id).SerializeToString()
        parts = [wrapper, *field(_RESPONSE, parts)]
    return join(parts)  # the rows are copied only here


def _encode_output(reply: EncodeReply, i: int, shape: ReplyShape) -> list[Buffer]:
    """Return the parts of the RaggedTensor that holds one output of all sequences."""
    output = reply.plan.outputs[i]
    arrays = [it.outputs[i] for it in reply.sequences]
    indices: list[Buffer] = []
    if isinstance(arrays[0], IndexedRows):
        indices = [it.indices.data.cast("B") for it in arrays if it.indices is not None and it.indices.size]
        arrays = [it.rows for it in arrays]
    elif shape.without_special and output.kind is OutputKind.TOKENS:
        pairs = zip(arrays, reply.sequences, strict=True)
        arrays = [rows if it.special is None else rows[~it.special] for rows, it in pairs]
    tensor = pb.RaggedTensor(
        kind=_OUTPUT_KIND_NAMES[output.kind],
        l2_normalized=reply.plan.unit[i],
        data_type=_DATA_TYPE_NAMES[output.data_type],
        width=reply.plan.widths[i],
        lengths=list(map(len, arrays)),
    )
    data = [array.data.cast("B") for array in arrays if array.size]
    return [tensor.SerializeToString(), *field(_DATA, data), *(field(_INDICES, indices) if indices else ())]


def encode_tokens(model: ServedModel, call: TokenizeCall, reply: TokenizeReply) -> bytes:
    """Return the bytes of a TokenizeResponse."""
    bundle = model.bundle
    response = pb.TokenizeResponse(model=bundle.name, model_version=bundle.version, fingerprint=bundle.fingerprint)
    for sequence, text in zip(reply.sequences, call.texts, strict=True):
        info = response.sequences.add()
        fill_counts(info, sequence)
        fill_tokens(info, sequence, model, call.include_token_strings, text, call.offset_unit)
    return response.SerializeToString()


def encode_stream_error(request_id: str, failure: Failure) -> bytes:
    """Return the bytes of the reply that reports the error of one request in a stream."""
    status = status_of(failure)
    error = pb.StreamError(
        code=status.code,
        message=status.message,
        reason=failure.reason,
        retry_delay_seconds=failure.retry_delay_s or 0.0,
        details=status.details,
    )
    return pb.EncodeStreamResponse(request_id=request_id, error=error).SerializeToString()


def encode_model_info(model: ServedModel, *, is_default: bool) -> pb.ModelInfo:
    """Describe a model."""
    bundle, limits = model.bundle, model.limits
    pooling = bundle.pooling
    reason = model.not_ready_reason()
    return pb.ModelInfo(
        name=bundle.name,
        version=bundle.version,
        fingerprint=bundle.fingerprint,
        space_id=bundle.space_id,
        is_default=is_default,
        d_model=bundle.d_model,
        n_layers=bundle.n_layers,
        n_heads=bundle.n_heads,
        vocab_size=bundle.vocab_size,
        max_sequence_tokens=bundle.max_sequence_tokens,
        has_tokenizer=model.tokenizer is not None,
        special_token_ids=bundle.special_token_ids,
        pooling=_pooling_name(pooling),
        l2_normalize=pooling.l2_normalize if pooling else False,
        provider=model.engine_info.provider,
        precision=model.engine_info.precision,
        max_request_sequences=limits.max_sequences,
        max_text_bytes=limits.max_text_bytes,
        max_request_bytes=limits.max_request_bytes,
        max_response_bytes=limits.max_response_bytes,
        max_request_tokens=limits.max_tokens,
        max_outputs=MAX_OUTPUTS,
        ready=not reason,
        not_ready_reason=reason,
        input_kind=pb.INPUT_KIND_EMBEDDINGS if bundle.graph.takes_vectors else pb.INPUT_KIND_TOKEN_IDS,
        can_inspect=model.max_inspect_tokens > 0,
        max_inspect_tokens=model.max_inspect_tokens,
        position=bundle.position,
        parameters=[pb.PartParameters(part=part, count=count) for part, count in bundle.parameters.items()],
        vector_width=pooling.width if pooling else 0,
        default_dimensions=pooling.dimensions if pooling else 0,
        prompts=bundle.prompts,
        default_prompt_name=bundle.default_prompt_name,
        similarity=bundle.similarity,
        tasks=[_encode_task(task, settings) for task, settings in bundle.tasks.items()],
        multi_vector_width=bundle.multi_vector.head.width if bundle.multi_vector else 0,
        multi_vector_similarity=bundle.multi_vector.similarity if bundle.multi_vector else "",
        sparse_width=bundle.sparse.width if bundle.sparse else 0,
        score_method=pb.ScoreMethod.Name(score_method(bundle)),
        labels=bundle.scores.labels if bundle.scores else (),
        activation=pb.Activation.Name(bundle.scores.activation if bundle.scores else 0),
        takes_pairs_only=model.takes_pairs_only,
    )


def _encode_task(task: Task, settings: TaskSettings) -> pb.TaskInfo:
    return pb.TaskInfo(
        task=pb.Task.Name(task.value),
        prompt_name=settings.prompt_name,
        max_tokens=settings.max_tokens,
        min_tokens=settings.expansion.min_tokens if settings.expansion else 0,
    )


def _pooling_name(pooling: ModelPooling | None) -> str:
    kind = 0 if pooling is None else pooling.kinds[0] if pooling.is_plain else OutputKind.MODEL
    return pb.OutputKind.Name(kind)


def decode_input(name: str, it: pb.Input, longest: int) -> SentInput:
    """Decode one input. At most `longest` tokens are copied.

    Raises:
        InvalidField: The input is empty or malformed.
    """
    which = it.WhichOneof("input")
    if which == "text":
        return it.text
    if which == "token_ids":
        ids = it.token_ids.ids
        return SentIds(np.array(ids if len(ids) <= longest else ids[:longest], np.int64), len(ids))
    if which == "embeddings":
        return _decode_vectors(f"{name}.embeddings", it.embeddings, longest)
    raise InvalidField(name, "must set token_ids, text or embeddings; none is set")


def _decode_vectors(name: str, it: pb.TokenEmbeddings, longest: int) -> SentVectors:
    dtype = decode_float_type(f"{name}.data_type", it.data_type).dtype
    data, width = it.data, it.width
    if width < 1:
        raise InvalidField(f"{name}.width", f"must be at least 1; was {width}")
    row_bytes = width * dtype.itemsize
    if len(data) % row_bytes:
        raise InvalidField(
            f"{name}.data",
            f"must be a multiple of {width} x {dtype.itemsize} bytes; was {len(data)} bytes",
        )
    count = len(data) // row_bytes
    numbers = np.frombuffer(data, dtype, min(count, longest) * width)
    return SentVectors(numbers.astype(np.float32).reshape(-1, width), count)


def _decode_output(name: str, spec: pb.OutputSpec, data_type: DataType) -> OutputSpec:
    return OutputSpec(
        decode_enum(f"{name}.kind", spec.kind, _OUTPUT_KINDS, pb.OutputKind),
        spec.l2_normalize,
        data_type,
        spec.dimensions,
        spec.pool_factor,
        spec.max_active_dims,
        decode_enum(f"{name}.span_pooling", spec.span_pooling, _SPAN_POOLINGS, pb.OutputKind),
    )


def _decode_shape(options: pb.EncodeOptions) -> ReplyShape:
    detail = decode_enum("options.detail", options.detail, _DETAILS, pb.Detail)
    if options.include_token_strings and detail is None:
        detail = Detail.TOKENS
    if options.include_token_strings and detail is not Detail.TOKENS and detail is not None:
        problem = f"needs DETAIL_TOKENS; options.detail is DETAIL_{detail.name}"
        raise InvalidField("options.include_token_strings", problem)
    return ReplyShape(
        detail,
        options.include_token_strings,
        options.exclude_special_tokens,
        _decode_offset_unit("options.offset_unit", options.offset_unit),
    )


def _decode_offset_unit(name: str, value: int) -> OffsetUnit:
    unit = decode_enum(name, value, _OFFSET_UNITS, pb.OffsetUnit)
    if unit is OffsetUnit.TOKENS:
        raise InvalidField(name, "must not be OFFSET_UNIT_TOKENS; only Spans.unit may be OFFSET_UNIT_TOKENS")
    return unit


def _decode_spans(inputs: Sequence[pb.Input], outputs: Sequence[OutputSpec]) -> list[SentSpans | None]:
    """Return the spans of each input; None for an input without spans. At least one input must have spans."""
    with_spans = [i for i, it in enumerate(inputs) if it.HasField("spans")]
    if all(it.kind is not OutputKind.SPANS for it in outputs):
        raise InvalidField(f"inputs[{with_spans[0]}].spans", "needs OUTPUT_KIND_SPANS in options.outputs")
    decoded: list[SentSpans | None] = [None] * len(inputs)
    for i in with_spans:
        decoded[i] = _decode_ranges(f"inputs[{i}].spans", inputs[i])
    return decoded


def _decode_ranges(name: str, it: pb.Input) -> SentSpans:
    spans = it.spans
    unit = OffsetUnit.CODE_POINTS if it.HasField("text") else OffsetUnit.TOKENS
    if spans.unit:
        unit = decode_enum(f"{name}.unit", spans.unit, _OFFSET_UNITS, pb.OffsetUnit)
    starts, ends = np.array(spans.starts, np.int64), np.array(spans.ends, np.int64)  # (spans,)
    reversed_spans = starts > ends
    if reversed_spans.any():
        i = int(reversed_spans.argmax())
        raise InvalidField(f"{name}.starts[{i}]", f"must be at most the end of this span, {ends[i]}; was {starts[i]}")
    return SentSpans(unit, starts, ends)


def fill_counts(info: pb.SequenceInfo, sequence: TokenSequence) -> None:
    """Set the token counts of a sequence."""
    info.token_count = len(sequence.input)
    info.original_token_count = sequence.original_token_count
    info.truncated = sequence.truncated
    if sequence.token_spans is not None:
        info.span_token_counts.extend((sequence.token_spans[:, 1] - sequence.token_spans[:, 0]).tolist())


def fill_tokens(
    info: pb.SequenceInfo,
    sequence: TokenSequence,
    model: ServedModel,
    with_strings: bool,
    sent: str | None = None,
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS,
) -> None:
    """Set the fields that describe each token of a sequence.

    Args:
        info: The message to fill.
        sequence: The sequence.
        model: The model. Its tokenizer gives the token strings.
        with_strings: Whether to set the token strings. A model without a tokenizer has none.
        sent: The text of the sequence; None for token ids or vectors.
        offset_unit: The unit of the character offsets.
    """
    if sequence.special is not None:
        info.special.extend(sequence.special.tolist())
    if sequence.char_starts is not None and sequence.char_ends is not None:
        info.token_ids.extend(sequence.input.tolist())
        starts, ends = sequence.char_starts, sequence.char_ends
        if offset_unit is OffsetUnit.UTF8_BYTES and sent is not None and not sent.isascii():
            offsets = utf8_offsets(sent)
            starts, ends = offsets[starts].tolist(), offsets[ends].tolist()
        info.char_starts.extend(starts)
        info.char_ends.extend(ends)
    if with_strings and model.tokenizer is not None:
        info.tokens.extend(map(model.tokenizer.token_string, sequence.token_ids or ()))
