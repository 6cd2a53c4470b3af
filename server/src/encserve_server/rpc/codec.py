"""Protobuf to what the server works with, and back."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.errors import InvalidField, MalformedRequest
from encserve_server.models.inputs import SentIds, SentInput, SentVectors
from encserve_server.models.offsets import utf8_offsets
from encserve_server.models.served import (
    EncodeCall,
    EncodeReply,
    InspectCall,
    InspectReply,
    ServedModel,
    TokenizeCall,
    TokenizeReply,
)
from encserve_server.models.spans import POOLINGS, SentSpans
from encserve_server.models.token_pooling import EXTRA, can_pool
from encserve_server.rpc.status import Failure
from encserve_server.rpc.wire import Part, field
from encserve_server.types import (
    Bundle,
    CheckedSequence,
    DataType,
    Detail,
    InspectKind,
    InspectTensor,
    ModelPooling,
    OffsetUnit,
    Output,
    OutputKind,
    Task,
    TaskSettings,
)

M = TypeVar("M", bound=Message)

# The fields that are written by hand, by their numbers.
_OUTPUTS = pb.EncodeResponse.OUTPUTS_FIELD_NUMBER
_DATA = pb.RaggedTensor.DATA_FIELD_NUMBER
_INDICES = pb.RaggedTensor.INDICES_FIELD_NUMBER
_RESPONSE = pb.EncodeStreamResponse.RESPONSE_FIELD_NUMBER

# By the numbers that callers send, 0 standing for a default: looking them up in the descriptors takes 10 µs a call.
_OUTPUT_KINDS = {kind.value: kind for kind in OutputKind}
_OUTPUT_KIND_NAMES = {kind: pb.OutputKind.Name(kind.value) for kind in OutputKind}
_DATA_TYPES = {0: DataType.FLOAT32} | {data_type.value: data_type for data_type in DataType}
_DATA_TYPE_NAMES = {data_type: pb.DataType.Name(data_type.value) for data_type in DataType}
_OFFSET_UNITS = {unit.value: unit for unit in OffsetUnit}
_DETAILS = {detail.value: detail for detail in Detail}
_TASKS = {task.value: task for task in Task}
_TRUNCATES: dict[int, bool] = {pb.TRUNCATION_UNSPECIFIED: False, pb.TRUNCATION_REFUSE: False, pb.TRUNCATION_END: True}

_INDEXED = (OutputKind.MULTI_VECTOR, OutputKind.SPARSE)
_WITH_OWN_FIELDS = {OutputKind.SPANS, *_INDEXED}
# Of these every token matters, so that each is told unless less is asked for; and none of them may be binary.
_OF_TOKENS = (OutputKind.TOKENS, *_INDEXED)

# More of one input take so much memory while they are pooled that a few inputs would take all of it.
_MAX_SPANS = 16_384

# What is returned where nothing is asked for.
_ROWS = pb.OutputSpec(kind=pb.OUTPUT_KIND_TOKENS)

# Small enough that sending one holds nobody up, large enough that there are few.
_CHUNK_BYTES = 256 * 1024


def parse(message_type: type[M], data: bytes) -> M:
    """Parses a message.

    Raises:
        MalformedRequest: The bytes are not that message.
    """
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        raise MalformedRequest("", f"{len(data)} bytes that are not a {name}: {error}") from error


def decode_call(request: pb.EncodeRequest, model: ServedModel) -> EncodeCall:
    """Decodes a request whose inputs are not too many (`ServedModel.check_count`), filling in every default.

    Of each input no more is copied than the model can take: a request of a few MiB may hold a million ids.

    Raises:
        InvalidField: An enum has a value that this server does not know, an output is asked for twice, an input is
            empty or malformed, or the model's own pooling is wanted but not known.
    """
    options, bundle, inputs = request.options, model.bundle, list(request.inputs)
    task = _decode_task("options.task", options.task, bundle)
    data_type = _decode_data_type("options.data_type", options.data_type)
    outputs = _decode_outputs(options.outputs, data_type, task, bundle)
    return EncodeCall(
        inputs=[_decode_input(f"inputs[{i}]", it, bundle.max_sequence_tokens) for i, it in enumerate(inputs)],
        outputs=outputs,
        truncate=_decode_truncation("options.truncation", options.truncation),
        exclude_special_tokens=options.exclude_special_tokens,
        include_token_strings=options.include_token_strings,
        prompt_name=options.prompt_name if options.HasField("prompt_name") else None,
        task=task,
        detail=_decode_detail(options, outputs),
        offset_unit=_decode_offset_unit("options.offset_unit", options.offset_unit),
        spans=_decode_spans(inputs, outputs),
    )


def decode_tokenize_call(request: pb.TokenizeRequest, model: ServedModel) -> TokenizeCall:
    """Decodes a request whose texts are not too many, filling in every default.

    Raises:
        InvalidField: An enum has a value that this server does not know, or that is not for this.
    """
    truncate = _decode_truncation("truncation", request.truncation) if request.truncation else None
    return TokenizeCall(
        texts=request.texts,
        truncate=truncate,
        include_token_strings=request.include_token_strings,
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        task=_decode_task("task", request.task, model.bundle),
        offset_unit=_decode_offset_unit("offset_unit", request.offset_unit),
    )


def count_tokens(request: pb.EncodeRequest, longest: int) -> int | None:
    """How many tokens a request has if each input has at most `longest`; None where that takes more than counting."""
    if not all(it.HasField("token_ids") for it in request.inputs):
        return None
    return sum(min(len(it.token_ids.ids), longest) for it in request.inputs)


def encode_reply(model: ServedModel, call: EncodeCall, reply: EncodeReply, stream_request_id: str | None) -> bytes:
    """The bytes of an EncodeResponse, or with a stream's request id of an EncodeStreamResponse around it."""
    response = pb.EncodeResponse(
        model=model.bundle.name,
        model_version=model.bundle.version,
        fingerprint=model.bundle.fingerprint,
        space_id=model.bundle.space_id,
        timings=pb.Timings(
            tokenize_seconds=reply.tokenize_seconds,
            queue_seconds=max(encoded.queue_seconds for encoded in reply.encoded),
            compute_seconds=max(encoded.compute_seconds for encoded in reply.encoded),
        ),
    )
    for sequence, sent in zip(reply.sequences, call.inputs, strict=True):
        info = response.sequences.add()
        if call.detail is not Detail.NONE:
            _fill_counts(info, sequence)
        if call.detail is Detail.TOKENS:
            text = sent if isinstance(sent, str) else None
            _fill_tokens(info, sequence, model, call.include_token_strings, text, call.offset_unit)
    parts: list[Part] = [response.SerializeToString()]
    pooling = model.bundle.pooling
    for i, output in enumerate(call.outputs):
        arrays = [encoded.outputs[i] for encoded in reply.encoded]
        indices: list[Part] = []
        if output.kind in _INDEXED:
            indices = [it.indices.data.cast("B") for it in arrays if it.indices is not None and it.indices.size]
            arrays = [it.rows for it in arrays]
        elif call.exclude_special_tokens and output.kind is OutputKind.TOKENS:
            arrays = [_without_special(*its) for its in zip(arrays, reply.sequences, strict=True)]
        tensor = pb.RaggedTensor(
            kind=_OUTPUT_KIND_NAMES[output.kind],
            l2_normalized=output.l2_normalize or (pooling is not None and pooling.gives_unit_vectors(output)),
            data_type=_DATA_TYPE_NAMES[output.data_type],
            width=model.bundle.width(output),
            lengths=[len(array) for array in arrays],
        )
        data = [array.data.cast("B") for array in arrays if array.size]
        large = field(_DATA, data) + (field(_INDICES, indices) if indices else [])
        parts += field(_OUTPUTS, [tensor.SerializeToString(), *large])
    if stream_request_id is not None:
        around = pb.EncodeStreamResponse(request_id=stream_request_id).SerializeToString()
        parts = [around, *field(_RESPONSE, parts)]
    return b"".join(parts)  # the one copy of the rows


def encode_tokens(model: ServedModel, call: TokenizeCall, reply: TokenizeReply) -> bytes:
    """The bytes of a TokenizeResponse."""
    bundle = model.bundle
    response = pb.TokenizeResponse(model=bundle.name, model_version=bundle.version, fingerprint=bundle.fingerprint)
    for sequence, text in zip(reply.sequences, call.texts, strict=True):
        info = response.sequences.add()
        _fill_counts(info, sequence)
        _fill_tokens(info, sequence, model, call.include_token_strings, text, call.offset_unit)
    return response.SerializeToString()


def _without_special(rows: npt.NDArray[Any], sequence: CheckedSequence) -> npt.NDArray[Any]:
    """(seq, d_model) rows without those of special tokens."""
    return rows if sequence.special is None else rows[~sequence.special]


def encode_stream_error(request_id: str, failure: Failure) -> pb.EncodeStreamResponse:
    """One request's error as its answer in a stream."""
    error = pb.StreamError(
        code=failure.code.value[0],
        message=failure.text,
        reason=failure.reason,
        retry_delay_seconds=failure.retry_delay_s or 0.0,
        details=failure.details,
    )
    return pb.EncodeStreamResponse(request_id=request_id, error=error)


def encode_model_info(model: ServedModel, *, is_default: bool) -> pb.ModelInfo:
    """Describes a model."""
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
        tasks=[_encode_task(task, its) for task, its in bundle.tasks.items()],
        multi_vector_width=bundle.width_of(OutputKind.MULTI_VECTOR),
        multi_vector_similarity=bundle.multi_vector.similarity if bundle.multi_vector else "",
        sparse_width=bundle.sparse.width if bundle.sparse else 0,
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


def _decode_input(field: str, it: pb.Input, longest: int) -> SentInput:
    which = it.WhichOneof("input")
    if which == "text":
        return it.text
    if which == "token_ids":
        ids = it.token_ids.ids
        return SentIds(np.array(ids if len(ids) <= longest else ids[:longest], np.int64), len(ids))
    if which == "embeddings":
        return _decode_vectors(f"{field}.embeddings", it.embeddings, longest)
    raise InvalidField(field, "must be token_ids, text or embeddings; was none of them")


def _decode_vectors(field: str, it: pb.TokenEmbeddings, longest: int) -> SentVectors:
    dtype = _decode_float_type(f"{field}.data_type", it.data_type).dtype
    data, width = it.data, it.width
    if width < 1:
        raise InvalidField(f"{field}.width", f"must be at least 1; was {width}")
    row_bytes = width * dtype.itemsize
    if len(data) % row_bytes:
        raise InvalidField(
            f"{field}.data",
            f"must be whole vectors of {width} x {dtype.itemsize} bytes; was {len(data)} bytes",
        )
    count = len(data) // row_bytes
    numbers = np.frombuffer(data, dtype, min(count, longest) * width)
    return SentVectors(numbers.astype(np.float32).reshape(-1, width), count)


def _decode_outputs(
    specs: Sequence[pb.OutputSpec], data_type: DataType, task: Task, bundle: Bundle
) -> tuple[Output, ...]:
    if not specs:
        if data_type is not DataType.BINARY:
            return (Output(OutputKind.TOKENS, False, data_type),)
        specs = [_ROWS]
    if len(specs) > 1:
        _check_distinct(specs)
    return tuple(
        [_decode_output(f"options.outputs[{i}]", spec, data_type, task, bundle) for i, spec in enumerate(specs)]
    )


def _check_distinct(specs: Sequence[pb.OutputSpec]) -> None:
    """Refuses what is asked for twice."""
    seen: dict[tuple[object, ...], int] = {}
    for i, spec in enumerate(specs):
        kind = spec.kind or pb.OUTPUT_KIND_TOKENS
        key = (kind, spec.l2_normalize, spec.dimensions, spec.max_active_dims, spec.pool_factor, spec.span_pooling)
        if key in seen:
            raise InvalidField(f"options.outputs[{i}]", f"asks for the same as options.outputs[{seen[key]}]")
        seen[key] = i


def _decode_output(field: str, spec: pb.OutputSpec, data_type: DataType, task: Task, bundle: Bundle) -> Output:
    number = spec.kind or pb.OUTPUT_KIND_TOKENS
    if number not in _OUTPUT_KINDS:
        raise _unknown_value(f"{field}.kind", number, pb.OutputKind)
    kind = _OUTPUT_KINDS[number]
    width = bundle.width_of(kind)
    if not width:
        if kind is OutputKind.MODEL and not (bundle.multi_vector or bundle.sparse):
            raise InvalidField(
                f"{field}.kind",
                f"model {bundle.name} does not say how it was trained to pool; ask for a pooling by its name",
            )
        there = ", ".join(name for it, name in _OUTPUT_KIND_NAMES.items() if bundle.width_of(it))
        raise InvalidField(f"{field}.kind", f"model {bundle.name} has no {_OUTPUT_KIND_NAMES[kind]}; it has {there}")
    if spec.max_active_dims or spec.pool_factor or spec.span_pooling or kind is OutputKind.SPARSE:
        _check_own_fields(field, spec, kind, task)
    if spec.dimensions > width:
        raise InvalidField(
            f"{field}.dimensions", f"must be at most {width}, the numbers of a row; was {spec.dimensions}"
        )
    if data_type is DataType.BINARY and kind in _OF_TOKENS:
        raise InvalidField("options.data_type", f"DATA_TYPE_BINARY is not for {_OUTPUT_KIND_NAMES[kind]}, see {field}")
    if kind is OutputKind.MODEL and bundle.pooling is not None:
        return bundle.pooling.output(spec.l2_normalize, data_type, spec.dimensions)
    output = Output(kind, spec.l2_normalize, data_type, spec.dimensions)
    return _with_own_fields(output, field, spec, task, bundle) if kind in _WITH_OWN_FIELDS else output


def _with_own_fields(output: Output, field: str, spec: pb.OutputSpec, task: Task, bundle: Bundle) -> Output:
    """An output with the fields that only its kind has."""
    if output.kind is OutputKind.MULTI_VECTOR:
        return output._replace(task=task, pool_factor=spec.pool_factor)
    if output.kind is OutputKind.SPARSE and bundle.sparse is not None:
        return output._replace(max_active_dims=spec.max_active_dims or bundle.sparse.max_active_dims)
    if output.kind is OutputKind.SPANS:
        return output._replace(span_pooling=_decode_span_pooling(f"{field}.span_pooling", spec.span_pooling))
    return output


def _decode_span_pooling(field: str, value: int) -> OutputKind | None:
    if not value:
        return None
    pooling = _OUTPUT_KINDS.get(value)
    if pooling not in POOLINGS:
        there = ", ".join(_OUTPUT_KIND_NAMES[it] for it in POOLINGS)
        was = value if pooling is None else _OUTPUT_KIND_NAMES[pooling]
        raise InvalidField(field, f"must be one of {there}; was {was}")
    return pooling


def _decode_spans(inputs: Sequence[pb.Input], outputs: Sequence[Output]) -> list[SentSpans | None]:
    """The ranges of each input; nothing where none has any."""
    having = [i for i, it in enumerate(inputs) if it.HasField("spans")]
    if not having:
        return []
    if all(it.kind is not OutputKind.SPANS for it in outputs):
        raise InvalidField(f"inputs[{having[0]}].spans", "is for OUTPUT_KIND_SPANS, which options.outputs lack")
    decoded: list[SentSpans | None] = [None] * len(inputs)
    for i in having:
        decoded[i] = _decode_ranges(f"inputs[{i}].spans", inputs[i])
    return decoded


def _decode_ranges(field: str, it: pb.Input) -> SentSpans:
    spans = it.spans
    if spans.unit:
        if spans.unit not in _OFFSET_UNITS:
            raise _unknown_value(f"{field}.unit", spans.unit, pb.OffsetUnit)
        unit = _OFFSET_UNITS[spans.unit]
    else:
        unit = OffsetUnit.CODE_POINTS if it.HasField("text") else OffsetUnit.TOKENS
    count = len(spans.starts)
    if count > _MAX_SPANS:
        raise InvalidField(f"{field}.starts", f"must be at most {_MAX_SPANS}; was {count}")
    if len(spans.ends) != count:
        raise InvalidField(f"{field}.ends", f"must be as many as starts, {count}; was {len(spans.ends)}")
    starts, ends = np.array(spans.starts, np.int64), np.array(spans.ends, np.int64)  # (spans,)
    behind = starts > ends
    if behind.any():
        i = int(behind.argmax())
        raise InvalidField(f"{field}.starts[{i}]", f"must be at most the range's end, {ends[i]}; was {starts[i]}")
    return SentSpans(unit, starts, ends)


def _check_own_fields(field: str, spec: pb.OutputSpec, kind: OutputKind, task: Task) -> None:
    """Refuses what other kinds have, and what those kinds cannot have."""
    if spec.max_active_dims and kind is not OutputKind.SPARSE:
        raise InvalidField(f"{field}.max_active_dims", f"is for OUTPUT_KIND_SPARSE alone; was {spec.max_active_dims}")
    if spec.span_pooling and kind is not OutputKind.SPANS:
        raise InvalidField(f"{field}.span_pooling", f"is for OUTPUT_KIND_SPANS alone; was {spec.span_pooling}")
    for name in ("l2_normalize", "dimensions"):
        if kind is OutputKind.SPARSE and (value := getattr(spec, name)):
            raise InvalidField(
                f"{field}.{name}", f"is not for OUTPUT_KIND_SPARSE, whose rows are single weights; was {value}"
            )
    factor = spec.pool_factor
    if not factor:
        return
    if kind is not OutputKind.MULTI_VECTOR:
        raise InvalidField(f"{field}.pool_factor", f"is for OUTPUT_KIND_MULTI_VECTOR alone; was {factor:g}")
    if not 1 <= factor < math.inf:
        raise InvalidField(f"{field}.pool_factor", f"must be a number from 1; was {factor:g}")
    if task is Task.QUERY:
        raise InvalidField(f"{field}.pool_factor", f"is not for TASK_QUERY, which loses by it; was {factor:g}")
    if not can_pool():
        raise InvalidField(f"{field}.pool_factor", f"this server cannot pool vectors: it lacks {EXTRA}")


def _decode_task(field: str, value: int, bundle: Bundle) -> Task:
    if not value:
        return Task.NEITHER
    if value not in _TASKS:
        raise _unknown_value(field, value, pb.Task)
    if _TASKS[value] not in bundle.tasks:
        known = ", ".join(pb.Task.Name(it.value) for it in bundle.tasks)
        otherwise = f"it knows {known}" if known else "it treats all texts alike"
        raise InvalidField(field, f"model {bundle.name} does not know {pb.Task.Name(value)}; {otherwise}")
    return _TASKS[value]


def _decode_data_type(field: str, value: int) -> DataType:
    if value not in _DATA_TYPES:
        raise _unknown_value(field, value, pb.DataType)
    return _DATA_TYPES[value]


def _decode_float_type(field: str, value: int) -> DataType:
    """The type of numbers that have more than a sign."""
    data_type = _decode_data_type(field, value)
    if data_type is DataType.BINARY:
        raise InvalidField(field, "DATA_TYPE_BINARY is for pooled outputs of Encode alone")
    return data_type


def _decode_offset_unit(field: str, value: int) -> OffsetUnit:
    """What characters are counted in."""
    if not value:
        return OffsetUnit.CODE_POINTS
    if value not in _OFFSET_UNITS:
        raise _unknown_value(field, value, pb.OffsetUnit)
    if _OFFSET_UNITS[value] is OffsetUnit.TOKENS:
        raise InvalidField(field, "OFFSET_UNIT_TOKENS is for spans alone")
    return _OFFSET_UNITS[value]


def _decode_detail(options: pb.EncodeOptions, outputs: Sequence[Output]) -> Detail:
    value, strings = options.detail, options.include_token_strings
    if not value:
        if strings:
            return Detail.TOKENS
        for it in outputs:
            if it.kind in _OF_TOKENS:
                return Detail.TOKENS
        return Detail.COUNTS
    if value not in _DETAILS:
        raise _unknown_value("options.detail", value, pb.Detail)
    detail = _DETAILS[value]
    if strings and detail is not Detail.TOKENS:
        raise InvalidField(
            "options.include_token_strings", f"is for DETAIL_TOKENS alone; detail is DETAIL_{detail.name}"
        )
    return detail


def _decode_truncation(field: str, value: int) -> bool:
    if value not in _TRUNCATES:
        raise _unknown_value(field, value, pb.Truncation)
    return _TRUNCATES[value]


def _unknown_value(field: str, value: int, enum: Any) -> InvalidField:
    return InvalidField(field, f"must be a value of {enum.DESCRIPTOR.name}, 0 to {max(enum.values())}; was {value}")


def decode_inspect_call(request: pb.InspectRequest, model: ServedModel) -> InspectCall:
    """Decodes an inspection, filling in every default.

    Raises:
        InspectUnavailable: The model cannot be inspected; then its layers may not be known either.
        InvalidField: There is no input, an enum has a value that this server does not know, or a kind or layer is asked
            for twice or is not in the model.
    """
    model.check_inspectable()
    if request.input.HasField("spans"):
        raise InvalidField("input.spans", "is for Encode alone")
    return InspectCall(
        input=_decode_input("input", request.input, model.bundle.max_sequence_tokens),
        wanted=_decode_specs(request.tensors, model.bundle),
        data_type=_decode_float_type("data_type", request.data_type),
        truncate=_decode_truncation("truncation", request.truncation),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        task=_decode_task("task", request.task, model.bundle),
    )


def encode_inspect_header(model: ServedModel, call: InspectCall, reply: InspectReply) -> pb.InspectResponse:
    """Builds the first message of an inspection's answer."""
    bundle, inspection = model.bundle, reply.inspection
    header = pb.InspectHeader(
        model=bundle.name,
        model_version=bundle.version,
        fingerprint=bundle.fingerprint,
        space_id=bundle.space_id,
        timings=pb.Timings(
            tokenize_seconds=reply.tokenize_seconds,
            queue_seconds=inspection.queue_seconds,
            compute_seconds=inspection.compute_seconds,
        ),
    )
    _fill_counts(header.sequence, reply.sequence)
    _fill_tokens(header.sequence, reply.sequence, model, with_strings=True)
    if reply.sequence.text is None:
        header.sequence.token_ids.extend(reply.sequence.token_ids or ())
    for tensor in inspection.tensors:
        header.tensors.add(
            kind=pb.InspectKind.Name(tensor.kind.value),
            layers=tensor.layers,
            shape=tensor.shape,
            data_type=_DATA_TYPE_NAMES[call.data_type],
        )
    return pb.InspectResponse(header=header)


def encode_chunks(tensors: Sequence[InspectTensor], data_type: DataType) -> Iterator[pb.InspectResponse]:
    """Builds the other messages, each when it is asked for: the tensors' bytes, one after another."""
    for i, tensor in enumerate(tensors):
        for part in tensor.parts:
            with np.errstate(over="ignore"):
                numbers = np.ascontiguousarray(part.astype(data_type.dtype, copy=False))
            data = numbers.data.cast("B")
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = pb.TensorChunk(tensor=i, data=bytes(data[start : start + _CHUNK_BYTES]))
                yield pb.InspectResponse(chunk=chunk)


def _decode_specs(specs: Sequence[pb.InspectSpec], bundle: Bundle) -> list[tuple[InspectKind, tuple[int, ...]]]:
    if not specs:
        default = (pb.INSPECT_KIND_ATTENTION_WEIGHTS, pb.INSPECT_KIND_HIDDEN_STATES)
        specs = [pb.InspectSpec(kind=kind) for kind in default]
    wanted: dict[InspectKind, tuple[int, ...]] = {}
    for i, spec in enumerate(specs):
        field = f"tensors[{i}]"
        if spec.kind not in pb.InspectKind.values() or not spec.kind:
            last = len(pb.InspectKind.values()) - 1
            raise InvalidField(f"{field}.kind", f"must be a value of InspectKind, 1 to {last}; was {spec.kind}")
        kind = InspectKind(spec.kind)
        if kind in wanted:
            raise InvalidField(field, f"asks for the same kind as tensors[{list(wanted).index(kind)}]")
        wanted[kind] = _decode_layers(field, kind, spec.layers, bundle)
    return list(wanted.items())


def _decode_layers(field: str, kind: InspectKind, layers: Sequence[int], bundle: Bundle) -> tuple[int, ...]:
    if kind is InspectKind.POSITIONS:
        if bundle.position in ("none", "rotary"):
            raise InvalidField(f"{field}.kind", f"model {bundle.name} adds nothing for a token's place")
        if layers:
            raise InvalidField(f"{field}.layers", f"must be empty for positions; was {list(layers[:8])}")
        return ()
    count = bundle.n_layers + (kind is InspectKind.HIDDEN_STATES)
    for i, layer in enumerate(layers):
        if layer >= count:
            raise InvalidField(f"{field}.layers[{i}]", f"must be from 0 to {count - 1}; was {layer}")
        if i and layer <= layers[i - 1]:
            raise InvalidField(
                f"{field}.layers[{i}]", f"must be more than the one before, {layers[i - 1]}; was {layer}"
            )
    return tuple(layers) or tuple(range(count))


def _fill_counts(info: pb.SequenceInfo, sequence: CheckedSequence) -> None:
    """Tells how many tokens a sequence has."""
    info.token_count = len(sequence.input)
    info.original_token_count = sequence.original_token_count
    info.truncated = sequence.truncated
    if sequence.token_spans is not None:
        info.span_token_counts.extend((sequence.token_spans[:, 1] - sequence.token_spans[:, 0]).tolist())


def _fill_tokens(
    info: pb.SequenceInfo,
    sequence: CheckedSequence,
    model: ServedModel,
    with_strings: bool,
    sent: str | None = None,
    offset_unit: OffsetUnit = OffsetUnit.CODE_POINTS,
) -> None:
    """Tells of every token of a sequence; `sent` is the text that it was made of. Strings only where there are any."""
    if sequence.special is not None:
        info.special.extend(sequence.special.tolist())
    text = sequence.text
    if text is not None:
        info.token_ids.extend(text.ids.tolist())
        starts: Sequence[int] = text.char_starts
        ends: Sequence[int] = text.char_ends
        if offset_unit is OffsetUnit.UTF8_BYTES and sent is not None and not sent.isascii():
            places = utf8_offsets(sent)
            starts, ends = places[starts].tolist(), places[ends].tolist()
        info.char_starts.extend(starts)
        info.char_ends.extend(ends)
    if with_strings and model.tokenizer is not None:
        info.tokens.extend(map(model.tokenizer.token_string, sequence.token_ids or ()))
