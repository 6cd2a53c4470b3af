"""Reads the bodies of inference requests. A body is JSON; bytes of tensors may follow the JSON."""

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from encserve_server.errors import InvalidField, RequestTooLarge
from encserve_server.outputs import MAX_OUTPUTS
from encserve_server.protocols.http_json.decoding import (
    Hold,
    Int64,
    ObjectDecoder,
    decode,
    is_null,
    list_of,
    places_of,
    shown,
    shown_number,
    size_of,
    value_at,
)
from encserve_server.protocols.open_inference.requests import SentOutput, SentRequest
from encserve_server.protocols.open_inference.tensors import CHECKED_PARAMETERS, DTYPES, MAX_SHOWN, SentTensor
from encserve_server.system.background import TURN_BYTES

LENGTH_HEADER = "inference-header-content-length"
# The maximum number of bytes of Python objects for each byte of JSON. The worst case is `1,` as a float: 2 bytes become
# an object of 32 bytes and a pointer of 8 bytes in a list. A text such as `"a",` becomes a string of 64 bytes and a
# pointer.
_DECODED_GROWTH = 20
# The maximum number of bytes of a Python string for each byte of UTF-8.
_TEXT_GROWTH = 4
# The data of a tensor may have at most this number of lists in addition to the lists of its shape. Data with more lists
# are refused before decoding.
_SPARE_LISTS = 1024
_MAX_NAME = 64
_MAX_PARAMETERS = 64
_OPENING = re.compile(rb"[\[ \t\r\n]*")


class InferInput(msgspec.Struct):
    """An input tensor.

    Attributes:
        name: The name: text, query, input_ids, attention_mask, token_type_ids or inputs_embeds.
        datatype: BYTES for texts, INT64 or INT32 for ids and masks, FP32 for vectors.
        shape: The size of each dimension.
        parameters: binary_data_size is the number of this tensor's bytes after the JSON.
        data: The elements, as a flat list in row order or nested like the shape.
    """

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, msgspec.Raw] | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class InferOutput(msgspec.Struct):
    """A requested output.

    Attributes:
        name: The name.
        parameters: binary_data says whether the output is sent as bytes after the JSON.
    """

    name: str
    parameters: dict[str, msgspec.Raw] | None = None


class InferBody(msgspec.Struct):
    """The fields of an inference request.

    Attributes:
        inputs: The input tensors.
        outputs: The requested outputs. Default: all outputs of the model.
        parameters: For example task, truncate, dimensions, datatype and timeout.
        id: An id that the reply repeats.
        model_name: Ignored, because the path names the model.
        model_version: Ignored, because the path names the version.
    """

    inputs: list[InferInput]
    outputs: list[InferOutput] | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None


_SCALAR = msgspec.json.Decoder(bool | int | float | str | None)
_TEXTS = msgspec.json.Decoder(list[str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]])
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# The decoders of numbers. The key is the datatype and the depth of the lists, at least 1.
_NUMBERS: Mapping[tuple[str, int], msgspec.json.Decoder[list[Any]]] = {
    (name, depth): msgspec.json.Decoder(lists)
    for name, number in {"INT64": Int64, "INT32": _Int32, "FP32": float}.items()
    for depth, lists in enumerate((list[number], list[list[number]], list[list[list[number]]]), 1)  # type: ignore[valid-type]
}
_NUMBER_NAMES = {"INT64": "a whole number of 64 bits", "INT32": "a whole number of 32 bits", "FP32": "a number"}
_USED_PARAMETERS = frozenset({*CHECKED_PARAMETERS, "binary_data", "binary_data_size"})


class JsonData:
    """The field `data` of a tensor; see `TypedData`. The data is decoded when it is first used.

    So the tensor's shape can be checked against the model's limits before the data is decoded.
    """

    def __init__(self, tensor: InferInput, hold: Hold) -> None:
        """Keep the tensor.

        If the JSON has more than 64 KiB, `hold` is called before and after decoding. The first call adds an upper bound
        of the memory. The second call corrects the bound.
        """
        self._tensor = tensor
        self._json = tensor.data
        self._hold = hold

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, dtype: str) -> npt.NDArray[Any]:
        """Return the numbers as an array of shape (elements,).

        Raises:
            InvalidField: The data do not have the tensor's datatype or shape.
            MalformedRequest: The data are not JSON.
            BudgetFull: The decoded data exceed the free budget.
        """
        return np.asarray(self._values, dtype)

    def texts(self) -> Sequence[str]:
        """Return the texts. For errors see `numbers`."""
        return list(self._values)

    @cached_property
    def _values(self) -> npt.NDArray[Any] | list[str]:
        size = size_of(self._json)
        most = size * _DECODED_GROWTH if size > TURN_BYTES else 0
        self._hold(most)
        if self._tensor.datatype == "BYTES":
            texts = self._decode_texts()
            self._hold(sum(map(sys.getsizeof, texts)) - most if most else 0)
            return texts
        numbers = self._decode_numbers()
        self._hold(numbers.nbytes - most)
        return numbers

    def _decode_texts(self) -> list[str]:
        name = self._tensor.name
        try:
            found = decode(_TEXTS, self._json, name)
        except msgspec.ValidationError as error:
            places = places_of(error)
            field, wanted = (f"{name}[{places[0]}]", "a string") if places else (f"{name}.data", "a list of strings")
            wrong = shown(value_at(self._json, places[:1]))
            problem = f"must be {wanted}; was {wrong}. Texts may also be sent as bytes after the JSON"
            raise InvalidField(field, problem) from None
        return [it if isinstance(it, str) else it[0] for it in found]

    def _decode_numbers(self) -> npt.NDArray[Any]:
        """Return the numbers as an array of shape (elements,), in the tensor's datatype."""
        shape, datatype = self._tensor.shape, self._tensor.datatype
        json = bytes(self._json)
        opening = _OPENING.match(json)
        depth = 0 if opening is None else opening[0].count(b"[")
        if depth not in (1, len(shape)):
            raise self._wrong_nesting()
        if depth > 1 and json.count(b"[") > _lists_in(shape) + _SPARE_LISTS:
            raise self._wrong_nesting(f"; was {json.count(b'[')} lists, not {_lists_in(shape)}")
        try:
            values = decode(_NUMBERS[datatype, depth], self._json, f"{self._tensor.name}.data")
        except msgspec.ValidationError as error:
            raise self._wrong_number(places_of(error), depth) from None
        if depth > 1:
            self._check_nesting(values, ())
        with np.errstate(over="ignore"):  # a number beyond float32 becomes infinity, and is refused later
            return np.asarray(values, DTYPES[datatype]).reshape(-1)

    def _check_nesting(self, values: Sequence[Any], index: tuple[int, ...]) -> None:
        """Refuse lists that do not have the nesting of the shape."""
        wanted, *inner = self._tensor.shape[len(index) :]
        if len(values) != wanted:
            problem = f"must hold {wanted} {'lists' if inner else 'numbers'} for the shape {self._tensor.shape}"
            raise InvalidField(self._place(index), f"{problem}; was {len(values)}")
        for i, it in enumerate(values) if inner else ():
            self._check_nesting(it, (*index, i))

    def _wrong_nesting(self, more: str = "") -> InvalidField:
        shape = self._tensor.shape
        problem = f"must be a list of numbers, flat in row order or nested like the shape {shape}{more}"
        return InvalidField(f"{self._tensor.name}.data", problem)

    def _wrong_number(self, places: Sequence[int], depth: int) -> InvalidField:
        """Return the error for a value at `places` in lists of this depth."""
        shape, datatype = self._tensor.shape, self._tensor.datatype
        index = tuple(places)
        if len(places) < depth:
            found = shown(value_at(self._json, places))
            return InvalidField(self._place(index), f"must be a list for the shape {shape}; was {found}")
        if depth == 1 and len(shape) > 1 and (last := math.prod(shape) - 1) >= 0:
            index = tuple(map(int, np.unravel_index(min(places[0], last), shape)))
        found = shown_number(value_at(self._json, places[:-1]), places[-1])
        return InvalidField(self._place(index), f"must be {_NUMBER_NAMES[datatype]} ({datatype}); was {found}")

    def _place(self, index: Sequence[int]) -> str:
        """Return the path of an element or a list, such as `input_ids[3, 17]`."""
        return f"{self._tensor.name}[{', '.join(map(str, index))}]" if index else f"{self._tensor.name}.data"


def _lists_in(shape: Sequence[int]) -> int:
    """Return the number of lists in nested data of this shape."""
    return sum(math.prod(shape[:depth]) for depth in range(len(shape)))


class InferBodies:
    """Reads the bodies of inference requests."""

    def __init__(self, max_json_bytes: int, *, strict: bool) -> None:
        """Take the maximum number of bytes of JSON. `strict` is whether unknown fields are refused."""
        self._max_json_bytes = max_json_bytes
        self._body = ObjectDecoder(InferBody, "inputs", "outputs", strict=strict)
        self._input = ObjectDecoder(InferInput, strict=strict)
        self._output = ObjectDecoder(InferOutput, strict=strict)

    def read(self, body: bytes, headers: Mapping[str, str], hold: Hold) -> SentRequest:
        """Return a request. Each tensor and its data are decoded when they are first used.

        `hold` counts the memory that the decoded request takes in addition to its body.

        Raises:
            InvalidField: A field has another type.
            BudgetFull: The request exceeds the free budget.
            MalformedRequest: The body is not a JSON object.
            RequestTooLarge: The JSON is over the limit.
            UnknownField: A field is unknown, and unknown fields are refused.
        """
        size = _header_size(body, headers.get(LENGTH_HEADER))
        if size > self._max_json_bytes:
            raise RequestTooLarge(
                "",
                f"the JSON of an inference request must be at most {self._max_json_bytes} bytes (max_request_mib); was "
                f"{size}: send tensors as bytes after the JSON, or fewer inputs",
            )
        if size < len(body):
            hold(size)
        fields = self._body.decode(body[:size])
        outputs = _members(fields.outputs, "outputs")
        return SentRequest(
            self._tensors(_members(fields.inputs, "inputs"), memoryview(body)[size:], hold),
            [self._output_of(it, f"outputs[{i}]") for i, it in enumerate(outputs[:MAX_OUTPUTS])],
            len(outputs),
            _scalars("parameters", fields.parameters).items(),
            fields.id or "",
        )

    def _output_of(self, json: msgspec.Raw, path: str) -> SentOutput:
        output = self._output.decode(json, path)
        return SentOutput(output.name, _scalars(f"{path}.parameters", output.parameters, _USED_PARAMETERS))

    def _tensors(self, inputs: Sequence[msgspec.Raw], rest: memoryview, hold: Hold) -> Iterator[SentTensor]:
        """Yield the input tensors, with their parts of the bytes after the JSON."""
        at = 0
        for i, json in enumerate(inputs):
            tensor = self._input.decode(json, f"inputs[{i}]")
            name = tensor.name[:_MAX_NAME]
            parameters = _scalars(f"{name}.parameters", tensor.parameters, _USED_PARAMETERS)
            has_json = size_of(tensor.data) > 0 and not is_null(tensor.data)
            data: memoryview | JsonData
            if "binary_data_size" in parameters:
                size = _binary_size(name, parameters["binary_data_size"], len(rest) - at)
                if has_json:
                    raise InvalidField(f"{name}.data", "must be left out if parameters.binary_data_size is set")
                data, at = rest[at : at + size], at + size
                if tensor.datatype == "BYTES" and size > TURN_BYTES:
                    hold(size * _TEXT_GROWTH)
            elif not has_json:
                raise InvalidField(f"{name}.data", "is required, unless binary_data_size counts bytes after the JSON")
            else:
                data = JsonData(tensor, hold)
            yield SentTensor(tensor.name, tensor.datatype, tuple(tensor.shape[:MAX_SHOWN]), data, parameters)
        if at < len(rest):
            problem = f"must add up to the {len(rest)} bytes after the JSON; was {at}"
            raise InvalidField("inputs.parameters.binary_data_size", problem)


def _members(json: Any, path: str) -> list[msgspec.Raw]:
    """Return the JSON objects in a list that is not decoded yet. A null or missing field has no objects."""
    return [] if json is None or is_null(json) else list_of(json, path, "a list of objects")


def _header_size(body: bytes, said: str | None) -> int:
    """Return the number of bytes of JSON in a body. `said` is the value of the header with this number.

    Raises:
        InvalidField: The header is not a number, or the number is out of range.
    """
    if said is None:
        return len(body)
    if not said.isascii() or not said.isdigit() or len(said) > 20 or not 0 < int(said) <= len(body):
        problem = f"must be from 1 to {len(body)}, the bytes of the body that are JSON; was {said[:_MAX_NAME]!r}"
        raise InvalidField("Inference-Header-Content-Length", problem)
    return int(said)


def _binary_size(name: str, size: Any, left: int) -> int:
    """Return how many of the `left` bytes after the JSON belong to a tensor."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= left:
        problem = f"must be from 0 to {left}, the bytes after the JSON that no earlier input has"
        raise InvalidField(f"{name}.parameters.binary_data_size", f"{problem}; was {str(size)[:_MAX_NAME]!r}")
    return size


def _scalars(
    field: str, sent: Mapping[str, msgspec.Raw] | None, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the values of the parameters in `names`; None means all. A parameter with null counts as missing.

    Raises:
        InvalidField: A value is not a string, a number of 64 bits or a boolean, or there are too many parameters.
    """
    if sent is not None and len(sent) > _MAX_PARAMETERS:
        raise InvalidField(field, f"must hold at most {_MAX_PARAMETERS} parameters; was {len(sent)}")
    found = {
        name: _scalar(f"{field}.{name[:_MAX_NAME]}", json)
        for name, json in (sent or {}).items()
        if names is None or name in names
    }
    return {name: value for name, value in found.items() if value is not None}


def _scalar(field: str, json: msgspec.Raw) -> Any:
    problem = f"must be a string, a number of 64 bits or a boolean; was {shown(json)}"
    try:
        value = decode(_SCALAR, json, field)
    except msgspec.ValidationError:
        raise InvalidField(field, problem) from None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidField(field, problem)
    return value
