"""Bodies of inference requests: JSON, and behind it perhaps the bytes of tensors."""

import asyncio
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField, MalformedRequest, RequestTooLarge, UnknownField
from encserve_server.http.counting import COUNTED_BYTES, CountLimits, check_counts
from encserve_server.http.requests import IgnoredFields, decoded
from encserve_server.open_inference.requests import SentOutput, SentRequest
from encserve_server.open_inference.tensors import CHECKED_PARAMETERS, DTYPES, MAX_SHOWN, SentTensor
from encserve_server.outputs import MAX_OUTPUTS

LENGTH_HEADER = "inference-header-content-length"
# So many bytes is what a text takes, at most, for each of its JSON.
_TEXT_GROWTH = 4
# So many bytes of numbers, or so many numbers of several lists, are decoded before others have a turn.
_PIECE_BYTES = 64 * 1024
_TURN_NUMBERS = 16 * 1024
# A list takes as long to decode as so many numbers.
_NUMBERS_PER_LIST = 64
_OPENING = re.compile(rb"[\[ \t\r\n]*")
_PLACE = re.compile(r"\[(\d+)\]")


class InferInput(msgspec.Struct):
    """An input tensor.

    Attributes:
        name: Its name: text, input_ids, attention_mask, token_type_ids or inputs_embeds.
        datatype: BYTES for texts, INT64 or INT32 for ids and masks, FP32 for vectors.
        shape: Its dimensions.
        parameters: As binary_data_size: how many bytes behind the JSON are its data.
        data: Its elements, row by row or nested as the shape says.
    """

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, msgspec.Raw] | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class InferOutput(msgspec.Struct):
    """An output that is wanted.

    Attributes:
        name: Its name.
        parameters: As binary_data: whether it is sent as bytes behind the JSON.
    """

    name: str
    parameters: dict[str, msgspec.Raw] | None = None


class InferBody(msgspec.Struct):
    """The fields of an inference request.

    Attributes:
        inputs: The input tensors.
        outputs: The outputs that are wanted; all that the model has where none is named.
        parameters: As task, truncate, dimensions, datatype and timeout.
        id: What the answer is marked with.
        model_name: Ignored: the path names the model.
        model_version: Ignored: the path names the version.
    """

    inputs: list[InferInput]
    outputs: list[InferOutput] | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None


class _KnownBody(InferBody, forbid_unknown_fields=True):
    """The same, and no other field."""


class _StrictInput(InferInput, forbid_unknown_fields=True):
    """The same, and no other field."""


class _StrictOutput(InferOutput, forbid_unknown_fields=True):
    """The same, and no other field."""


class _StrictBody(InferBody, forbid_unknown_fields=True):
    """The same, and no other field in it or below it."""

    inputs: list[_StrictInput]  # type: ignore[assignment]
    outputs: list[_StrictOutput] | None = None  # type: ignore[assignment]


_FIELDS = frozenset(field.name for field in msgspec.structs.fields(InferBody))
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY_BODY = msgspec.json.Decoder(InferBody)
_SCALAR = msgspec.json.Decoder(bool | int | float | str | None)
_TEXTS = msgspec.json.Decoder(list[str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]])
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_NUMBERS: dict[str, msgspec.json.Decoder[list[Any]]] = {
    "INT64": msgspec.json.Decoder(list[_Int64]),
    "INT32": msgspec.json.Decoder(list[_Int32]),
    "FP32": msgspec.json.Decoder(list[float]),
}
# Between the lists of nested numbers; that it is JSON is known.
_LIST_BEGINS: re.Pattern[bytes] = re.compile(rb"[, \t\r\n]*\[")
_LIST_ENDS: re.Pattern[bytes] = re.compile(rb"[ \t\r\n]*\]")
_LOOKED_AT = frozenset({*CHECKED_PARAMETERS, "binary_data", "binary_data_size"})


class LoadedData(ABC):
    """The data of a tensor that are decoded in turns; see `TypedData`. `load` comes first."""

    def __init__(self) -> None:
        """Starts empty."""
        self._values: npt.NDArray[Any] | list[str] = []

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, dtype: str) -> npt.NDArray[Any]:
        """(elements,)."""
        return np.asarray(self._values, dtype)

    def texts(self) -> Sequence[str]:
        """As they are."""
        return list(self._values)

    @abstractmethod
    async def load(self, tensor: SentTensor, hold: Callable[[int], None], max_text_bytes: int) -> None:
        """Decodes the data of a tensor; `hold` is called with the bytes that they take.

        Raises:
            InvalidField: The data are not of the tensor's datatype or not as its shape says, or a text is too long.
            MalformedRequest: They are no JSON.
            BudgetFull: `hold` has no room for them.
        """


class JsonData(LoadedData):
    """The `data` of a tensor."""

    def __init__(self, json: msgspec.Raw) -> None:
        """Takes the JSON."""
        super().__init__()
        self._json = json

    async def load(self, tensor: SentTensor, hold: Callable[[int], None], max_text_bytes: int) -> None:
        """See `LoadedData`."""
        del max_text_bytes  # texts in JSON are few MiB, and checked with all others
        size = memoryview(self._json).nbytes
        if tensor.datatype == "BYTES":
            hold(size * _TEXT_GROWTH)
            self._values = _texts(tensor, self._json)
        else:
            hold(size)
            self._values = await _all_numbers(tensor, bytes(self._json), hold)
        self._json = msgspec.Raw()


class RawTexts(LoadedData):
    """Texts as bytes behind the JSON."""

    def __init__(self, data: memoryview) -> None:
        """Takes the bytes."""
        super().__init__()
        self._data = data

    async def load(self, tensor: SentTensor, hold: Callable[[int], None], max_text_bytes: int) -> None:
        """See `LoadedData`."""
        texts: list[str] = []
        size = 0
        for text in replace(tensor, data=self._data).texts(max_text_bytes):
            texts.append(text)
            size += sys.getsizeof(text)
            if size > _PIECE_BYTES:
                hold(size)
                await asyncio.sleep(0)
                size = 0
        hold(size)
        self._values = texts


def _texts(tensor: SentTensor, json: msgspec.Raw) -> list[str]:
    try:
        found = decoded(_TEXTS, json)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        field = f"{tensor.name}[{place[1]}]" if place else f"{tensor.name}.data"
        raise InvalidField(field, "must be a string; texts may also be sent as bytes behind the JSON") from None
    return [it if isinstance(it, str) else it[0] for it in found]


async def _all_numbers(tensor: SentTensor, json: bytes, hold: Callable[[int], None]) -> npt.NDArray[Any]:
    """(elements,) of the tensor's datatype."""
    parts: list[npt.NDArray[Any]] = []
    cost = 0
    for index, begin, end in _lists(tensor, json):
        count = 0
        for part in _numbers(tensor, json, index, begin, end):
            hold(part.nbytes)
            parts.append(part)
            count += len(part)
            cost += len(part) + _NUMBERS_PER_LIST
            if cost > _TURN_NUMBERS:
                await asyncio.sleep(0)
                cost = 0
        if index and count != tensor.shape[-1]:
            problem = f"must hold {tensor.shape[-1]} numbers for the shape {list(tensor.shape)}; was {count}"
            raise InvalidField(_element(tensor, index), problem)
    return np.concatenate(parts)


def _lists(tensor: SentTensor, json: bytes) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Each list of numbers: its place in the tensor, empty for a list of all, and where its numbers begin and end.

    Raises:
        InvalidField: They are not nested as the shape says.
    """
    opening = _OPENING.match(json)
    depth = 0 if opening is None else opening[0].count(b"[")
    if depth == 1:
        yield from _inner_lists(tensor, json, 0, (), ())
    elif depth == len(tensor.shape):
        yield from _inner_lists(tensor, json, 0, tensor.shape[:-1], ())
    else:
        problem = f"must be a list of numbers, row by row or nested as the shape {list(tensor.shape)} says"
        raise InvalidField(f"{tensor.name}.data", problem)


def _inner_lists(
    tensor: SentTensor, json: bytes, at: int, sizes: tuple[int, ...], index: tuple[int, ...]
) -> Generator[tuple[tuple[int, ...], int, int], None, int]:
    """See `_lists`: of a list that holds lists of these sizes, or, without sizes, numbers. Returns where it ends."""
    problem = f"must be nested as the shape {list(tensor.shape)} says"
    begins = _LIST_BEGINS.match(json, at)
    if begins is None:
        raise InvalidField(f"{tensor.name}.data", f"{problem}; {_element(tensor, index)} is no list")
    at = begins.end()
    if not sizes:
        end = json.find(b"]", at)
        yield index, at, end
        return end + 1
    for i in range(sizes[0]):
        at = yield from _inner_lists(tensor, json, at, sizes[1:], (*index, i))
    ends = _LIST_ENDS.match(json, at)
    if ends is None:
        raise InvalidField(f"{tensor.name}.data", f"{problem}; {_element(tensor, index)} holds more than {sizes[0]}")
    return ends.end()


def _numbers(
    tensor: SentTensor, json: bytes, index: tuple[int, ...], begin: int, end: int
) -> Iterator[npt.NDArray[Any]]:
    """(n,) the numbers of a list, in pieces.

    Raises:
        InvalidField: One is not of the tensor's datatype.
    """
    done = 0
    while begin <= end:
        cut = json.find(b",", begin + _PIECE_BYTES, end)
        piece_end = end if cut < 0 else cut
        try:
            values = _NUMBERS[tensor.datatype].decode(b"[%b]" % json[begin:piece_end])
        except msgspec.ValidationError as error:
            place = _PLACE.search(str(error))
            raise _no_number(tensor, index, done + int(place[1] if place else 0), error) from None
        except msgspec.DecodeError:
            raise InvalidField(f"{tensor.name}.data", "must be a list of numbers, or nested lists of numbers") from None
        with np.errstate(over="ignore"):  # what is too large for 32 bits is infinite, and refused as that
            yield np.array(values, DTYPES[tensor.datatype])
        done += len(values)
        begin = piece_end + 1


def _no_number(tensor: SentTensor, index: tuple[int, ...], place: int, error: Exception) -> InvalidField:
    """What is wrong with one element of a list."""
    shape = tensor.shape
    if not index and (last := math.prod(shape) - 1) >= 0:  # a list of all
        *index_, place = map(int, np.unravel_index(min(place, last), shape))
        index = tuple(index_)
    problem = f"must be {'a number' if tensor.datatype == 'FP32' else 'a whole number'} ({tensor.datatype})"
    return InvalidField(_element(tensor, (*index, place)), f"{problem}; {str(error).partition(' - at')[0]}")


def _element(tensor: SentTensor, index: tuple[int, ...]) -> str:
    """As in `input_ids[3, 17]`."""
    return f"{tensor.name}[{', '.join(map(str, index))}]" if index else f"{tensor.name}.data"


class InferBodies:
    """Reads the bodies of inference requests."""

    def __init__(self, limits: CountLimits, max_json_bytes: int, *, strict: bool) -> None:
        """Takes how many values JSON may hold, and bytes, and whether fields that are not known are refused."""
        self._limits = limits
        self._max_json_bytes = max_json_bytes
        self._strict = strict
        self._decoder: msgspec.json.Decoder[InferBody] = msgspec.json.Decoder(_StrictBody if strict else _KnownBody)
        self._ignored = IgnoredFields(InferBody)

    async def read(self, body: bytes, headers: Mapping[str, str], hold: Callable[[int], None]) -> SentRequest:
        """A request; the data of its tensors are not decoded yet. `hold` is called with the bytes that it takes.

        Raises:
            InvalidField: A field is not of its type, or the bytes behind the JSON are not what its tensors say.
            BudgetFull: `hold` has no room for them.
            MalformedRequest: The body is no JSON object.
            RequestTooLarge: The JSON is over the limit.
            UnknownField: There is a field that is not known, and fields are read strictly.
            EncserveError: Whatever `check_counts` raises.
        """
        size = _header_size(body, headers.get(LENGTH_HEADER))
        if size > self._max_json_bytes:
            raise RequestTooLarge(
                "",
                f"the JSON of an inference request must be at most {self._max_json_bytes} bytes (max_request_mib); was "
                f"{size}: send tensors as bytes behind the JSON, or fewer inputs",
            )
        if size < len(body):
            hold(size)
        header = body[:size]
        if size > COUNTED_BYTES:
            await check_counts(header, "inputs", self._limits)
        fields = self._decode(header)
        if size > COUNTED_BYTES:
            await asyncio.sleep(0)
        outputs = fields.outputs or []
        return SentRequest(
            _tensors(fields.inputs, memoryview(body)[size:]),
            [
                SentOutput(it.name, _scalars(f"outputs[{i}].parameters", it.parameters, _LOOKED_AT))
                for i, it in enumerate(outputs[:MAX_OUTPUTS])
            ],
            len(outputs),
            _scalars("parameters", fields.parameters).items(),
            fields.id or "",
        )

    def _decode(self, header: bytes) -> InferBody:
        try:
            return decoded(self._decoder, header)
        except msgspec.ValidationError as error:
            if not _is_unknown_field(error):
                _explain(error)
        try:
            unknown = sorted(decoded(_OBJECT, header).keys() - _FIELDS)
            if self._strict:
                there = ", ".join(sorted(_FIELDS))
                raise UnknownField(unknown[0][:64], f"is not known; there are {there} (strict_http)")
            self._ignored.log(unknown)
            return decoded(_ANY_BODY, header)
        except msgspec.ValidationError as error:
            _explain(error)


def _is_unknown_field(error: msgspec.ValidationError) -> bool:
    """Whether the one mistake found so far is a field of the body itself that is not known."""
    return str(error).startswith("Object contains unknown field") and " - at " not in str(error)


def _explain(error: msgspec.ValidationError) -> NoReturn:
    """Raises what is wrong with a body that is not as its struct wants it."""
    problem, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if not path:
        raise MalformedRequest("", f"the body must be a JSON object with inputs: {problem}") from None
    raise InvalidField(path[:64], problem) from None


def _header_size(body: bytes, said: str | None) -> int:
    """How many bytes of a body are JSON.

    Raises:
        InvalidField: The header that says so is wrong.
    """
    if said is None:
        return len(body)
    if not said.isascii() or not said.isdigit() or len(said) > 20 or not 0 < int(said) <= len(body):
        problem = f"must be from 1 to {len(body)}, the bytes of the body that are JSON; was {said[:64]!r}"
        raise InvalidField("Inference-Header-Content-Length", problem)
    return int(said)


def _tensors(inputs: Sequence[InferInput], rest: memoryview) -> Iterator[SentTensor]:
    """The input tensors, the bytes behind the JSON dealt out to them."""
    at = 0
    for it in inputs:
        name = it.name[:64]
        parameters = _scalars(f"{name}.parameters", it.parameters, _LOOKED_AT)
        has_json = memoryview(it.data).nbytes > 0 and bytes(memoryview(it.data)[:5]) != b"null"
        data: memoryview | LoadedData
        if "binary_data_size" in parameters:
            end = at + _binary_size(name, parameters["binary_data_size"], len(rest) - at)
            if has_json:
                raise InvalidField(f"{name}.data", "must be left out beside parameters.binary_data_size")
            data, at = rest[at:end], end
            if it.datatype == "BYTES":
                data = RawTexts(data)
        elif not has_json:
            raise InvalidField(f"{name}.data", "is required, unless binary_data_size names bytes behind the JSON")
        else:
            data = JsonData(it.data)
        yield SentTensor(it.name, it.datatype, tuple(it.shape[:MAX_SHOWN]), data, parameters)
    if at < len(rest):
        problem = f"must add up to the {len(rest)} bytes behind the JSON; was {at}"
        raise InvalidField("inputs.parameters.binary_data_size", problem)


def _binary_size(name: str, size: Any, left: int) -> int:
    """How many bytes a tensor has behind the JSON, where so many are left."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= left:
        problem = f"must be from 0 to {left}, the bytes behind the JSON that no other input has; was {str(size)[:64]!r}"
        raise InvalidField(f"{name}.parameters.binary_data_size", problem)
    return size


def _scalars(
    field: str, sent: Mapping[str, msgspec.Raw] | None, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Parameters with their values, all or those of these names; those that are null are not there.

    Raises:
        InvalidField: One is neither a string, nor a number of 64 bits, nor a boolean.
    """
    found = {
        name: _scalar(f"{field}.{name[:64]}", json)
        for name, json in (sent or {}).items()
        if names is None or name in names
    }
    return {name: value for name, value in found.items() if value is not None}


def _scalar(field: str, json: msgspec.Raw) -> Any:
    problem = "must be a string, a number of 64 bits or a boolean"
    try:
        value = _SCALAR.decode(json)
    except (msgspec.DecodeError, ValueError):
        raise InvalidField(field, problem) from None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidField(field, problem)
    return value
