"""Protobuf to what the server works with, and back."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.bundle import Bundle
from encserve_server.errors import InvalidField, MalformedRequest
from encserve_server.models import EncodeCall, EncodeReply, SentIds, ServedModel
from encserve_server.outputs import build_output
from encserve_server.status import Failure
from encserve_server.types import CheckedSequence, DataType, Output, OutputKind

M = TypeVar("M", bound=Message)


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
    """Decodes a request, filling in every default.

    What can be refused by a count is refused before anything is copied: a request of a few MiB may hold a million
    inputs or ids.

    Raises:
        TooManyInputs: More inputs than one request may hold.
        InvalidField: There is no input, an enum has a value that this server does not know, an output is asked for
            twice, an input is neither text nor ids, or the model's own pooling is wanted but not known.
    """
    model.check_count(len(request.inputs))
    options, bundle = request.options, model.bundle
    return EncodeCall(
        inputs=[_decode_input(i, it, bundle.max_sequence_tokens) for i, it in enumerate(request.inputs)],
        outputs=_decode_outputs(options.outputs, bundle),
        data_type=_decode_data_type(options.data_type),
        truncate=_decode_truncation(options.truncation),
        exclude_special_tokens=options.exclude_special_tokens,
        include_token_strings=options.include_token_strings,
    )


def encode_reply(model: ServedModel, call: EncodeCall, reply: EncodeReply) -> pb.EncodeResponse:
    """Builds the response: one contiguous buffer for each output."""
    rows = [encoded.rows for encoded in reply.encoded]
    special = [sequence.special if call.exclude_special_tokens else None for sequence in reply.sequences]
    response = pb.EncodeResponse(
        model=model.bundle.name,
        model_version=model.bundle.version,
        fingerprint=model.bundle.fingerprint,
        sequences=[_encode_sequence(sequence, call, model) for sequence in reply.sequences],
        timings=pb.Timings(
            tokenize_seconds=reply.tokenize_seconds,
            queue_seconds=max(encoded.queue_seconds for encoded in reply.encoded),
            compute_seconds=max(encoded.compute_seconds for encoded in reply.encoded),
        ),
    )
    for output in call.outputs:
        ragged = build_output(rows, special, output, call.data_type)
        response.outputs.add(
            kind=pb.OutputKind.Name(output.kind.value),
            l2_normalized=output.l2_normalize,
            data_type=pb.DataType.Name(call.data_type.value),
            width=model.bundle.d_model,
            lengths=ragged.lengths,
            data=ragged.data,
        )
    return response


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
    reason = model.scheduler.not_ready_reason()
    return pb.ModelInfo(
        name=bundle.name,
        version=bundle.version,
        fingerprint=bundle.fingerprint,
        is_default=is_default,
        d_model=bundle.d_model,
        n_layers=bundle.n_layers,
        n_heads=bundle.n_heads,
        vocab_size=bundle.vocab_size,
        max_sequence_tokens=bundle.max_sequence_tokens,
        has_tokenizer=model.tokenizer is not None,
        special_token_ids=bundle.special_token_ids,
        pooling=pb.OutputKind.Name(bundle.pooling.kind.value if bundle.pooling else 0),
        l2_normalize=bundle.pooling.l2_normalize if bundle.pooling else False,
        provider=model.engine_info.provider,
        precision=model.engine_info.precision,
        max_request_sequences=limits.max_sequences,
        max_text_bytes=limits.max_text_bytes,
        max_request_bytes=limits.max_request_bytes,
        max_response_bytes=limits.max_response_bytes,
        max_request_tokens=limits.max_tokens,
        ready=not reason,
        not_ready_reason=reason,
    )


def _decode_input(i: int, it: pb.Input, longest: int) -> str | SentIds:
    which = it.WhichOneof("input")
    if which == "text":
        return it.text
    if which == "token_ids":
        ids = it.token_ids.ids
        return SentIds(np.array(ids[:longest], np.int64), len(ids))
    raise InvalidField(f"inputs[{i}]", "must be token_ids or text; was neither")


def _decode_outputs(specs: Sequence[pb.OutputSpec], bundle: Bundle) -> tuple[Output, ...]:
    if not specs:
        return (Output(OutputKind.TOKENS, l2_normalize=False),)
    outputs: list[Output] = []
    seen: dict[tuple[int, bool], int] = {}
    for i, spec in enumerate(specs):
        field = f"options.outputs[{i}]"
        kind = spec.kind or pb.OUTPUT_KIND_TOKENS
        key = (kind, spec.l2_normalize)
        if key in seen:
            raise InvalidField(field, f"asks for the same as options.outputs[{seen[key]}]")
        seen[key] = i
        if kind == pb.OUTPUT_KIND_MODEL_POOLING:
            if bundle.pooling is None:
                raise InvalidField(f"{field}.kind", f"model {bundle.name} does not say how it was trained to pool")
            outputs.append(Output(bundle.pooling.kind, bundle.pooling.l2_normalize or spec.l2_normalize))
        elif kind in pb.OutputKind.values():
            outputs.append(Output(OutputKind(kind), spec.l2_normalize))
        else:
            raise _unknown_value(f"{field}.kind", kind, "OutputKind", len(pb.OutputKind.values()))
    return tuple(outputs)


def _decode_data_type(value: int) -> DataType:
    if value not in pb.DataType.values():
        raise _unknown_value("options.data_type", value, "DataType", len(pb.DataType.values()))
    return DataType(value or pb.DATA_TYPE_FLOAT32)


def _decode_truncation(value: int) -> bool:
    if value not in pb.Truncation.values():
        raise _unknown_value("options.truncation", value, "Truncation", len(pb.Truncation.values()))
    return value == pb.TRUNCATION_END


def _unknown_value(field: str, value: int, enum: str, count: int) -> InvalidField:
    return InvalidField(field, f"must be a value of {enum}, 0 to {count - 1}; was {value}")


def _encode_sequence(sequence: CheckedSequence, call: EncodeCall, model: ServedModel) -> pb.SequenceInfo:
    info = pb.SequenceInfo(
        token_count=len(sequence.ids),
        original_token_count=sequence.original_token_count,
        truncated=sequence.truncated,
    )
    ids = sequence.ids.tolist()
    if sequence.special is not None:
        info.special.extend(sequence.special.tolist())
    if sequence.text is not None:
        info.token_ids.extend(ids)
        info.char_starts.extend(sequence.text.char_starts)
        info.char_ends.extend(sequence.text.char_ends)
    if call.include_token_strings and model.tokenizer is not None:
        info.tokens.extend(map(model.tokenizer.token_string, ids))
    return info
