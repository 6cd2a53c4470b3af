"""Convert answers to NumPy arrays, and merge the answers of a call.

Sizes and lengths are checked before use.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from encserve_client.exceptions import EncserveError, FingerprintError, ProtocolError, SpaceError
from encserve_client.options import TASKS, Array, InputKind, Options, Output, kind_name
from encserve_client.results import (
    Block,
    EncodedOutput,
    EncodeResult,
    ModelInfo,
    SequenceInfo,
    TaskInfo,
    Timings,
)
from encserve_proto.v1 import encoder_pb2 as pb

T = TypeVar("T", bound=np.generic)
# Stands for the tokens of a failed input.
_NO_TOKENS = SequenceInfo(0, 0, False, None, None, None, None)
# Old servers do not set this field. They take token ids.
_INPUT_KINDS: dict[int, InputKind] = {
    pb.INPUT_KIND_UNSPECIFIED: "token_ids",
    pb.INPUT_KIND_TOKEN_IDS: "token_ids",
    pb.INPUT_KIND_EMBEDDINGS: "embeddings",
}
_SCORE_METHODS: dict[int, str] = {
    pb.SCORE_METHOD_LABELS: "labels",
    pb.SCORE_METHOD_VECTORS: "vectors",
    pb.SCORE_METHOD_MULTI_VECTORS: "multi_vectors",
    pb.SCORE_METHOD_SPARSE: "sparse",
}
_ACTIVATIONS: dict[int, str] = {
    pb.ACTIVATION_NONE: "none",
    pb.ACTIVATION_SIGMOID: "sigmoid",
    pb.ACTIVATION_SOFTMAX: "softmax",
}


class HasIds(Protocol):
    """An answer that names its model."""

    @property
    def fingerprint(self) -> str:
        """The id of the bundle."""

    @property
    def space_id(self) -> str:
        """The id of the vector space; "" if unknown."""


@dataclass(frozen=True, slots=True)
class ExpectedIds:
    """The ids that every answer must have; "" for any.

    Attributes:
        fingerprint: The id of the bundle.
        space_id: The id of the vector space.
    """

    fingerprint: str = ""
    space_id: str = ""

    def check(self, answer: "HasIds") -> None:
        """Check the ids of an answer. Servers check too, except old servers without these fields.

        Raises:
            FingerprintError: The answer has another fingerprint.
            SpaceError: The answer has another space id, or none.
        """
        self.check_fingerprint(answer.fingerprint)
        if self.space_id and self.space_id != answer.space_id:
            raise _mismatch(SpaceError, "expected_space_id", self.space_id, answer.space_id)

    def check_fingerprint(self, fingerprint: str) -> None:
        """Check the fingerprint of an answer that has no space id. Raise FingerprintError as `check` does."""
        if self.fingerprint and self.fingerprint != fingerprint:
            raise _mismatch(FingerprintError, "expected_fingerprint", self.fingerprint, fingerprint)


def _mismatch(kind: type[EncserveError], field: str, expected: str, found: str) -> EncserveError:
    text = f"{field}: {expected} is expected, but the answer has {found or 'none'}"
    return kind(text, code=grpc.StatusCode.FAILED_PRECONDITION, field=field)


def decode_response(response: pb.EncodeResponse, options: Options, n_inputs: int, *, describe: bool) -> EncodeResult:
    """Convert the answer to a request with `n_inputs` inputs and these options.

    The result has no reference to `response`, and has no total time yet. `describe`: whether to convert the tokens of
    each input.

    Raises:
        ProtocolError: The answer is not valid. The message names the problem.
    """
    _check_count("outputs", len(response.outputs), len(options.outputs))
    _check_count("sequences", len(response.sequences), n_inputs)
    outputs = []
    for index, (tensor, output) in enumerate(zip(response.outputs, options.outputs, strict=True)):
        name = f"outputs[{index}]"
        _check_kind(tensor, output, name)
        block = _block(tensor, options, n_inputs, name)
        if options.detail != "none" or output.is_pooled:
            _check_lengths(block, response.sequences, output, options, name)
        outputs.append(EncodedOutput(kind_name(tensor.kind), tensor.l2_normalized, (block,)))
    seconds = response.timings
    return EncodeResult(
        response.model,
        response.model_version,
        response.fingerprint,
        tuple(outputs),
        tuple(map(sequence_info, response.sequences)) if describe else (),
        Timings(seconds.tokenize_seconds, seconds.queue_seconds, seconds.compute_seconds, 0.0, 1, 1),
        response.space_id,
    )


def sequence_info(message: pb.SequenceInfo) -> SequenceInfo:
    """Convert the tokens of one input.

    Raises:
        ProtocolError: The length of a list differs from the number of tokens.
    """
    count = message.token_count
    fields = ("token_ids", "char_starts", "char_ends", "special", "tokens")
    for name in fields:
        if length := len(getattr(message, name)):
            _check_count(f"{name} of a sequence", length, count)
    offsets = None
    if message.char_starts or message.char_ends:
        _check_count("char_ends of a sequence", len(message.char_ends), len(message.char_starts))
        offsets = np.array([message.char_starts, message.char_ends], dtype=np.int64).T  # (token_count, 2)
    return SequenceInfo(
        token_count=count,
        original_token_count=message.original_token_count,
        truncated=message.truncated,
        token_ids=_array(message.token_ids, np.int64),
        offsets=offsets,
        special=_array(message.special, np.bool_),
        tokens=tuple(message.tokens) if message.tokens else None,
        span_token_counts=_array(message.span_token_counts, np.int64),
    )


def _array(values: Sequence[Any], dtype: type[T]) -> npt.NDArray[T] | None:
    return np.array(values, dtype) if values else None


def sequence_infos(response: pb.TokenizeResponse, n_texts: int) -> list[SequenceInfo]:
    """Convert the answer to a TokenizeRequest with `n_texts` texts.

    Raises:
        ProtocolError: The answer is not valid.
    """
    _check_count("sequences", len(response.sequences), n_texts)
    return [sequence_info(sequence) for sequence in response.sequences]


def model_info(message: pb.ModelInfo) -> ModelInfo:
    """Convert the description of a model. Fields without a line here are copied unchanged."""
    values = {field.name: getattr(message, field.name) for field in fields(ModelInfo)}
    pooling = kind_name(message.pooling)
    values["pooling"] = None if pooling in (0, "tokens", "multi_vector", "sparse", "spans") else pooling  # 0 is unknown
    values["input_kind"] = _INPUT_KINDS.get(message.input_kind, message.input_kind)
    values["score_method"] = _SCORE_METHODS.get(message.score_method, "")
    values["labels"] = tuple(message.labels)
    values["activation"] = _ACTIVATIONS.get(message.activation, "")
    values["special_token_ids"] = tuple(message.special_token_ids)
    values["parameters"] = {part.part: part.count for part in message.parameters}
    values["prompts"] = dict(sorted(message.prompts.items()))
    values["tasks"] = {
        name: TaskInfo(task.prompt_name, task.max_tokens, task.min_tokens)
        for task in message.tasks
        for name, number in TASKS.items()
        if task.task == number
    }
    return ModelInfo(**values)


def _check_kind(tensor: pb.RaggedTensor, output: Output, name: str) -> None:
    if output.kind != "model" and tensor.kind != output.number:  # "model" may have another kind with the same rows
        raise ProtocolError(f"{name}.kind must be {output.kind!r}; was {kind_name(tensor.kind)!r}")
    if output.l2_normalize and not tensor.l2_normalized:
        raise ProtocolError(f"{name}.l2_normalized must be True; was False")


def _block(tensor: pb.RaggedTensor, options: Options, n_inputs: int, name: str) -> Block:
    """Return the rows of a tensor as a view on its bytes."""
    if tensor.data_type != options.data_type:
        raise ProtocolError(f"{name}.data_type must be {options.data_type}; was {tensor.data_type}")
    if tensor.width < 1:
        raise ProtocolError(f"{name}.width must be >= 1; was {tensor.width}")
    _check_count(f"{name}.lengths", len(tensor.lengths), n_inputs)
    lengths = np.array(tensor.lengths, dtype=np.int64)
    rows = int(lengths.sum())
    data = tensor.data  # protobuf copies the data at each access
    columns = options.columns(tensor.width)
    n_bytes = rows * columns * options.numpy_dtype.itemsize
    if len(data) != n_bytes:
        raise ProtocolError(
            f"{name}.data must have {n_bytes} bytes: {rows} rows of {tensor.width} {options.dtype}; was {len(data)}"
        )
    matrix: Array = np.frombuffer(data, dtype=options.numpy_dtype).reshape(rows, columns)
    has_indices = tensor.kind == pb.OUTPUT_KIND_SPARSE or (tensor.kind == pb.OUTPUT_KIND_MULTI_VECTOR and not rows)
    if not tensor.indices and not has_indices:  # merged vectors have no indices
        return Block(matrix, lengths)
    _check_count(f"{name}.indices", len(tensor.indices), 4 * rows)
    return Block(matrix, lengths, np.frombuffer(tensor.indices, "<u4"))


def _check_lengths(
    block: Block, sequences: Sequence[pb.SequenceInfo], output: Output, options: Options, name: str
) -> None:
    """Check the number of rows of each input."""
    if output.is_pooled:
        expected = np.ones_like(block.lengths)
    elif output.kind != "tokens":
        expected = block.lengths  # other kinds have any number of rows
    else:
        expected = np.array([sequence.token_count for sequence in sequences], dtype=np.int64)
        if options.exclude_special_tokens:
            expected = np.minimum(expected, block.lengths)
    wrong = np.flatnonzero(block.lengths != expected)
    if wrong.size:
        index = int(wrong[0])
        raise ProtocolError(f"{name}.lengths[{index}] must be {expected[index]}; was {block.lengths[index]}")


def _check_count(name: str, count: int, expected: int) -> None:
    if count != expected:
        raise ProtocolError(f"the answer must have {expected} {name}; had {count}")


def merge_answers(
    found: Sequence[tuple[Sequence[int], EncodeResult]],
    errors: Mapping[int, EncserveError],
    total_seconds: float,
    attempts: int,
    sparse_width: int = 0,
) -> EncodeResult:
    """Merge the answers of a call into one result.

    Args:
        found: (indices of the inputs, answer) of each message, in the order of the inputs. At least one.
        errors: The error of each failed input, by index, in order.
        total_seconds: The duration of the call.
        attempts: The number of sent messages.
        sparse_width: The `sparse_width` of the model.

    Raises:
        FingerprintError: The answers are from different bundles.
        ProtocolError: The answers have rows of different widths.
    """
    answers = list(_with_failed_inputs(found, errors)) if errors else [answer for _, answer in found]
    first = answers[0]
    for answer in answers:
        check_fingerprint(first.fingerprint, answer.fingerprint)
        for index, (output, like) in enumerate(zip(answer.outputs, first.outputs, strict=True)):
            columns, expected = output.blocks[0].rows.shape[1], like.blocks[0].rows.shape[1]
            _check_count(f"columns of outputs[{index}]", columns, expected)
    outputs = tuple(
        EncodedOutput(
            of_messages[0].kind,
            of_messages[0].l2_normalized,
            tuple(output.blocks[0] for output in of_messages),
            sparse_width if of_messages[0].kind == "sparse" else 0,
            errors,
        )
        for of_messages in zip(*(answer.outputs for answer in answers), strict=True)
    )
    timings = [answer.timings for answer in answers]
    return replace(
        first,
        outputs=outputs,
        sequences=tuple(info for answer in answers for info in answer.sequences),
        timings=Timings(
            max(it.tokenize_seconds for it in timings),
            max(it.queue_seconds for it in timings),
            max(it.compute_seconds for it in timings),
            total_seconds,
            len(found),
            attempts,
        ),
        errors=errors,
    )


def _with_failed_inputs(
    found: Sequence[tuple[Sequence[int], EncodeResult]], errors: Mapping[int, EncserveError]
) -> Iterator[EncodeResult]:
    """Yield the answers with all failed inputs. A failed input has no rows and no tokens."""
    begin = 0
    ends = [indices[0] for indices, _ in found[1:]] + [len(errors) + sum(len(indices) for indices, _ in found)]
    for (indices, answer), end in zip(found, ends, strict=True):
        positions = np.subtract(indices, begin)  # (inputs,)
        outputs = []
        for output in answer.outputs:
            lengths = np.zeros(end - begin, np.int64)
            lengths[positions] = output.blocks[0].lengths
            outputs.append(replace(output, blocks=(replace(output.blocks[0], lengths=lengths),)))
        sequences = [_NO_TOKENS] * (end - begin)
        for position, info in zip(positions.tolist(), answer.sequences, strict=False):
            sequences[position] = info
        yield replace(answer, outputs=tuple(outputs), sequences=sequences)
        begin = end


def check_fingerprint(first: str, other: str) -> None:
    """Raise FingerprintError if two answers of one call are from different bundles."""
    if first != other:
        raise FingerprintError(
            f"answers of one call have different fingerprints, {first} and {other}: the model was replaced in between; "
            "call again, and name the version if this happens often"
        )


def empty_result(
    info: ModelInfo, options: Options, errors: Mapping[int, EncserveError], total_seconds: float, attempts: int
) -> EncodeResult:
    """Return the result of a call without successful inputs: arrays with the model's widths and no rows."""
    outputs = tuple(
        EncodedOutput(
            output.kind,
            output.l2_normalize or options.dtype == "int8",
            (_no_rows(options.columns(info.width(output)), options.numpy_dtype, len(errors)),),
            info.sparse_width if output.kind == "sparse" else 0,
            errors,
        )
        for output in options.outputs
    )
    timings = Timings(0.0, 0.0, 0.0, total_seconds, 0, attempts)
    sequences = (_NO_TOKENS,) * len(errors)
    return EncodeResult(info.name, info.version, info.fingerprint, outputs, sequences, timings, info.space_id, errors)


def _no_rows(columns: int, dtype: np.dtype[Any], n_inputs: int) -> Block:
    return Block(np.empty((0, columns), dtype), np.zeros(n_inputs, np.int64))
