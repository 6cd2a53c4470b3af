"""Bodies of inference requests: JSON whose tensors may have millions of numbers, and behind it perhaps bytes.

Any decoder takes a tenth of a second for 32 MiB of numbers in one call, and nothing else runs meanwhile. So lists of
numbers are cut out of a body before it is decoded, and are decoded in pieces between which other requests have a turn.
"""

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField, MalformedRequest, UnknownField
from encserve_server.http.counting import CountLimits, check_counts
from encserve_server.open_inference.requests import SentOutput, SentRequest
from encserve_server.open_inference.tensors import CHECKED_PARAMETERS, MAX_SHOWN, SentTensor
from encserve_server.outputs import MAX_OUTPUTS

logger = logging.getLogger(__name__)

LENGTH_HEADER = "inference-header-content-length"
_PIECE_BYTES = 64 * 1024
_WINDOW_BYTES = 1024 * 1024
# A smaller header is decoded as it is; what is in a larger one is counted first.
_COUNTED_BYTES = 64 * 1024
_MAX_SHAPE_BYTES = 1024
# No number is longer, nor the blanks around it.
_MAX_NUMBER_BYTES = 8 * 1024
# Strings that a body may have besides its inputs; see `counting`.
_OTHER_KEYS = 200
# So many names of unknown fields are logged.
_MOST_WARNED = 64
_KEY = b'"data"'
_VALUE = re.compile(rb"[ \t\r\n]{0,256}:[ \t\r\n]{0,256}(?=\[)")
_FIRST = re.compile(rb"[\[ \t\r\n]{1,256}[-0-9\]]")
_BLANKS = b" \t\r\n"
_EMPTY = b"[]" + _BLANKS
# Stands for numbers that have been cut out of a body, where no caller can know it.
_CUT = secrets.token_hex(8).encode()
_NO_BRACKETS = bytes.maketrans(b"[]", b"  ")
_PLACE = re.compile(r"\$\[(\d+)\]")


class InferInput(msgspec.Struct):
    """An input tensor."""

    name: str
    datatype: str
    shape: msgspec.Raw
    parameters: dict[str, msgspec.Raw] | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class InferOutput(msgspec.Struct):
    """An output that is wanted."""

    name: str
    parameters: dict[str, msgspec.Raw] | None = None


class InferBody(msgspec.Struct):
    """The fields of an inference request."""

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
_SHAPE = msgspec.json.Decoder(list[int])
_SCALAR = msgspec.json.Decoder(bool | int | float | str | None)
_TEXTS = msgspec.json.Decoder(list[str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]])
_NUMBERS: dict[str, msgspec.json.Decoder[list[Any]]] = {
    "INT64": msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]),
    "INT32": msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]),
    "FP32": msgspec.json.Decoder(list[float]),
}
_LOOKED_AT = frozenset({*CHECKED_PARAMETERS, "binary_data", "binary_data_size"})
_DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}


class JsonData:
    """The `data` of a tensor; see `TypedData`. `load` comes first."""

    def __init__(self, body: bytes, begin: int = 0, end: int = 0, texts: bytes = b"") -> None:
        """Takes where numbers are in a body, or the JSON of what is not numbers alone."""
        self._body = body
        self._begin = begin
        self._end = end
        self._json = texts
        self._values: npt.NDArray[Any] | list[str] = []

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, dtype: str) -> npt.NDArray[Any]:
        """(elements,)."""
        return np.asarray(self._values, dtype)

    def texts(self) -> Sequence[str]:
        """As they are."""
        return list(self._values)

    async def load(self, tensor: SentTensor, hold: Callable[[int], None]) -> None:
        """Decodes the data of a tensor; `hold` is called with the bytes of numbers before these are made.

        Raises:
            InvalidField: The data are not of the tensor's datatype, or there are more or fewer than its shape says.
            MalformedRequest: They are no JSON.
            BudgetFull: `hold` has no room for it.
        """
        if tensor.datatype == "BYTES":
            self._values = self._decode_texts(tensor.name)
        elif self._json:
            raise InvalidField(f"{tensor.name}.data", "must be a list of numbers, nested or row by row")
        else:
            await self._decode_numbers(tensor, hold)

    def _decode_texts(self, name: str) -> list[str]:
        if not self._json and not self._body[self._begin : min(self._begin + 256, self._end)].strip(_EMPTY):
            return []
        try:
            found = _decoded(_TEXTS, self._json or b"[0]")
        except msgspec.ValidationError as error:
            place = _PLACE.search(str(error))
            field = f"{name}[{place[1]}]" if place else f"{name}.data"
            problem = "must be a string; texts may also be sent as bytes behind the JSON"
            raise InvalidField(field, problem) from None
        return [it if isinstance(it, str) else it[0] for it in found]

    async def _decode_numbers(self, tensor: SentTensor, hold: Callable[[int], None]) -> None:
        count = await self._count()
        if not math.prod(tensor.shape):
            count = 0
        tensor.check_elements(count)
        dtype = np.dtype(_DTYPES[tensor.datatype])
        hold(count * dtype.itemsize)
        values = np.empty(count, dtype)
        place, at = 0, self._begin
        while place < count:
            comma = self._body.find(b",", min(at + _PIECE_BYTES, self._end), self._end)
            end = self._end if comma < 0 else comma
            if end - at > _PIECE_BYTES + _MAX_NUMBER_BYTES:
                raise InvalidField(f"{tensor.name}.data", f"must be numbers of at most {_MAX_NUMBER_BYTES} characters")
            piece = _decode_piece(tensor, self._body[at:end], place)
            if place + len(piece) > count:
                break
            with np.errstate(over="ignore"):  # what is too large for 32 bits is infinite, and refused as that
                values[place : place + len(piece)] = piece
            place, at = place + len(piece), end + 1
            await asyncio.sleep(0)
        tensor.check_elements(place)
        self._values = values

    async def _count(self) -> int:
        """How many numbers there are: one more than commas, if there are any."""
        commas = opened = closed = 0
        body = self._body
        for begin in range(self._begin, self._end, _WINDOW_BYTES):
            end = min(begin + _WINDOW_BYTES, self._end)
            commas += body.count(b",", begin, end)
            opened += body.count(b"[", begin, end)
            closed += body.count(b"]", begin, end)
            await asyncio.sleep(0)
        if opened != closed:
            raise MalformedRequest("", "the body is no JSON: the brackets of a list of numbers do not match")
        is_empty = not commas and not body[self._begin : min(self._begin + 256, self._end)].strip(_EMPTY)
        return 0 if is_empty else commas + 1


def _decode_piece(tensor: SentTensor, piece: bytes, place: int) -> list[Any]:
    """Some of the numbers of a tensor, from the one at `place` on."""
    try:
        return _decoded(_NUMBERS[tensor.datatype], b"[" + piece.translate(_NO_BRACKETS) + b"]")
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        at = min(place + int(found[1] if found else 0), math.prod(tensor.shape) - 1)
        where = ", ".join(map(str, np.unravel_index(at, tensor.shape)))
        problem = f"must be {'a number' if tensor.datatype == 'FP32' else 'a whole number'} ({tensor.datatype})"
        raise InvalidField(f"{tensor.name}[{where}]", f"{problem}; {str(error).partition(' - at')[0]}") from None


class InferBodies:
    """Reads the bodies of inference requests."""

    def __init__(self, limits: CountLimits, *, strict: bool) -> None:
        """Takes how many values a body may hold besides numbers, and whether fields that are not known are refused."""
        self._limits = limits
        self._strict = strict
        self._decoder: msgspec.json.Decoder[InferBody] = msgspec.json.Decoder(_StrictBody if strict else _KnownBody)
        self._warned: set[str] = set()

    async def read(self, body: bytes, headers: Mapping[str, str]) -> SentRequest:
        """A request; the data of its tensors are not decoded yet.

        Raises:
            InvalidField: A field is not of its type, or the bytes behind the JSON are not what its tensors say.
            MalformedRequest: The body is no JSON object.
            UnknownField: There is a field that is not known, and fields are read strictly.
            EncserveError: Whatever `check_counts` raises.
        """
        size = _header_size(body, headers.get(LENGTH_HEADER))
        header, spans = await _cut_numbers(body, size, self._limits.sequences + _OTHER_KEYS)
        if len(header) > _COUNTED_BYTES:
            await check_counts(header, "inputs", self._limits)
        fields = self._decode(header)
        outputs = fields.outputs or []
        return SentRequest(
            _tensors(fields.inputs, body, size, spans),
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
            return _decoded(self._decoder, header)
        except msgspec.ValidationError as error:
            if not _is_unknown_field(error):
                _explain(error)
        try:
            unknown = sorted(_decoded(_OBJECT, header).keys() - _FIELDS)
            if self._strict:
                there = ", ".join(sorted(_FIELDS))
                raise UnknownField(unknown[0][:64], f"is not known; there are {there} (strict_http)")
            self._warn(unknown)
            return _decoded(_ANY_BODY, header)
        except msgspec.ValidationError as error:
            _explain(error)

    def _warn(self, unknown: Sequence[str]) -> None:
        """Logs names that have not been logged, as many as are of use."""
        for name in unknown:
            if name not in self._warned and len(self._warned) < _MOST_WARNED:
                self._warned.add(name)
                logger.warning("a field over HTTP is ignored", extra={"field": name[:64], "body": InferBody.__name__})


AnyJson = TypeVar("AnyJson")


def _decoded(decoder: msgspec.json.Decoder[AnyJson], json: bytes) -> AnyJson:
    """What JSON holds.

    Raises:
        ValidationError: It is not of the decoder's type.
        MalformedRequest: It is no JSON.
    """
    try:
        return decoder.decode(json)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest("", f"the body is no JSON: {error}") from error


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


async def _cut_numbers(body: bytes, size: int, most_keys: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The first bytes of a body with a string for each list of numbers that is the value of `data`; where those are.

    Lists of strings stay, and so do lists of both, which are refused when they are decoded. No more keys are looked at
    than a body may have strings.
    """
    parts: list[bytes] = []
    spans: list[tuple[int, int]] = []
    done = at = keys = 0
    while keys < most_keys and (key := await _find(body, _KEY, at, size)) >= 0:
        at, keys = key + len(_KEY), keys + 1
        value = _VALUE.match(body, at, size)
        if value is None or body[key - 1 : key] == b"\\" or len(spans) == MAX_SHOWN:
            continue
        begin = value.end()
        if not _FIRST.match(body, begin, size):
            continue
        end = await _end_of_numbers(body, begin, size)
        if body[end - 1 : end] != b"]":
            continue
        parts += [body[done:begin], b'"%s%d"' % (_CUT, len(spans))]
        spans.append((begin, end))
        done = at = end
    parts.append(body[done:size])
    return b"".join(parts), spans


async def _find(body: bytes, what: bytes, begin: int, size: int) -> int:
    """Where something is; -1 where it is nowhere."""
    while begin < size:
        found = body.find(what, begin, min(begin + _WINDOW_BYTES + len(what), size))
        if found >= 0:
            return found
        begin += _WINDOW_BYTES
        await asyncio.sleep(0)
    return -1


async def _end_of_numbers(body: bytes, begin: int, size: int) -> int:
    """Where a list of numbers ends: before what is no part of one, without the comma and the blanks there."""
    while begin < size:
        window = min(begin + _WINDOW_BYTES, size)
        found = body.find(b'"', begin, window)
        brace = body.find(b"}", begin, window if found < 0 else found)
        if brace >= 0 or found >= 0:
            end = brace if brace >= 0 else found
            kept = body[max(0, end - 256) : end].rstrip(b"," + _BLANKS)
            return end - (min(256, end) - len(kept))
        begin = window
        await asyncio.sleep(0)
    return size


def _tensors(
    inputs: Sequence[InferInput], body: bytes, size: int, spans: Sequence[tuple[int, int]]
) -> Iterator[SentTensor]:
    """The input tensors, the bytes behind the JSON dealt out to them."""
    at, rest = size, memoryview(body)
    for it in inputs:
        name = it.name[:64]
        parameters = _scalars(f"{name}.parameters", it.parameters, _LOOKED_AT)
        json = bytes(it.data).removeprefix(b"null")
        data: memoryview | JsonData
        if "binary_data_size" in parameters:
            end = at + _binary_size(name, parameters["binary_data_size"], len(body) - at)
            if json:
                raise InvalidField(f"{name}.data", "must not be there beside parameters.binary_data_size")
            data, at = rest[at:end], end
        elif not json:
            raise InvalidField(f"{name}.data", "must be there, or binary_data_size and bytes behind the JSON")
        else:
            data = _json_data(json, body, spans)
        yield SentTensor(it.name, it.datatype, _shape(name, it.shape), data, parameters)
    if at < len(body):
        problem = f"must add up to the {len(body) - size} bytes behind the JSON; was {at - size}"
        raise InvalidField("inputs.parameters.binary_data_size", problem)


def _binary_size(name: str, size: Any, left: int) -> int:
    """How many bytes a tensor has behind the JSON, where so many are left."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= left:
        problem = f"must be from 0 to {left}, the bytes behind the JSON that no other input has; was {size!r}"
        raise InvalidField(f"{name}.parameters.binary_data_size", problem)
    return size


def _json_data(json: bytes, body: bytes, spans: Sequence[tuple[int, int]]) -> JsonData:
    if json.startswith(b'"' + _CUT):
        return JsonData(body, *spans[int(json[1 + len(_CUT) : -1])])
    return JsonData(body, texts=json)


def _shape(name: str, json: msgspec.Raw) -> tuple[int, ...]:
    problem = "must be a list of whole numbers"
    if len(bytes(json)) > _MAX_SHAPE_BYTES:
        raise InvalidField(f"{name}.shape", f"{problem} of at most {_MAX_SHAPE_BYTES} characters")
    try:
        return tuple(_SHAPE.decode(json)[:MAX_SHOWN])
    except (msgspec.DecodeError, ValueError):
        raise InvalidField(f"{name}.shape", problem) from None


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
