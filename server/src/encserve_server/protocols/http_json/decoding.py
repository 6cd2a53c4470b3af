"""Decodes JSON bodies into the structs of their routes.

The fields of an object are decoded in one step, except inputs and inner objects. These first stay `msgspec.Raw`. Then
each input is decoded separately. After each 64 KiB of inputs, the event loop runs other requests.
"""

import asyncio
import itertools
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, cast, get_args

import msgspec
import numpy as np

from encserve_server.errors import InvalidField, MalformedRequest, RequestError, TooManyInputs, UnknownField
from encserve_server.protocols.http_json.json_errors import explain
from encserve_server.settings import Settings
from encserve_server.system.background import TURN_BYTES

logger = logging.getLogger(__name__)

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)
AnyJson = TypeVar("AnyJson")
Json = bytes | msgspec.Raw
# Adds this number of bytes to the memory that the call holds. A negative number gives bytes back. See `Call.hold`.
Hold = Callable[[int], None]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

# For each kind of object, at most this number of unknown fields is logged.
_MAX_LOGGED_NAMES = 64
_MAX_SHOWN = 64
# The maximum number of bytes of Python objects for each byte of JSON. The worst case is `-6,`: 3 bytes become an int of
# 32 bytes and a pointer of 8 bytes in a list.
_DECODED_GROWTH = 14
# The same limit for JSON of any type. The worst case is `[],`: 3 bytes become a list of 72 bytes and a pointer.
_ANY_GROWTH = 27
# The same limit for text. If one character is outside the BMP, Python stores each character of the text in 4 bytes.
_TEXT_GROWTH = 4
_ID_BYTES = 40
# JSON takes at most 6 bytes for each byte of a text: `A` may be written as `\u0041`.
_ESCAPE_BYTES = 6

_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BRACKET = ord("[")
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_FORM = re.compile(rb'(?P<null>n)|(?P<text>")|(?P<object>{)|(?P<ids>\[\s*[-0-9])|(?P<list>\[)')
_VALUE = re.compile(rb'\s*(?P<value>["{\[tfn]|[-+.0-9eE]{1,64})')
_VALUE_NAMES = {
    b"{": "an object",
    b"[": "a list",
    b'"': "a string",
    b"t": "a boolean",
    b"f": "a boolean",
    b"n": "null",
}
_TYPE_NAMES: Mapping[Any, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    list[str]: "a list of strings",
    list[int]: "a list of whole numbers",
    dict[str, msgspec.Raw]: "an object",
}
_PLACES = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class InputKind:
    """How the inputs in a field are decoded.

    Attributes:
        decoder: Decodes one input.
        wanted: The allowed values of the field, for error messages.
        wanted_each: The allowed values of one input, for error messages.
        one_text: Whether the field may hold one text without a list.
        one_list: Whether the field may hold the ids of one input without a list around them.
        convert: Converts a decoded input. It takes the input's path, for error messages, and the input.
        growth: The maximum number of bytes of Python objects for each byte of JSON.
    """

    decoder: msgspec.json.Decoder[Any]
    wanted: str
    wanted_each: str
    one_text: bool = False
    one_list: bool = False
    convert: Callable[[str, Any], Any] | None = None
    growth: int = _DECODED_GROWTH


TEXTS_OR_IDS = InputKind(
    msgspec.json.Decoder(str | list[Int64]),
    "a string, a list of token ids, or a list of these",
    "a string or a list of token ids",
    one_text=True,
    one_list=True,
)
TEXTS = InputKind(msgspec.json.Decoder(str), "a string or a list of strings", "a string", one_text=True)
STRINGS = InputKind(msgspec.json.Decoder(str), "a list of strings", "a string")
TEXTS_OR_PAIRS = InputKind(
    msgspec.json.Decoder(str | list[str]),
    "a string, a pair of strings, or a list of lists of 1 or 2 strings",
    "a string, or a list of 1 or 2 strings",
    one_text=True,
)
DOCUMENTS = InputKind(
    msgspec.json.Decoder(str | dict[str, Any]),
    "a list of strings or objects",
    "a string or an object",
    one_text=True,
    growth=_ANY_GROWTH,
)
ANYTHING = InputKind(msgspec.json.Decoder(Any), "a list", "JSON", growth=_ANY_GROWTH)


class ObjectDecoder(Generic[AnyStruct]):
    """Decodes JSON objects of one kind."""

    def __init__(self, kind: type[AnyStruct], *raw: str, strict: bool) -> None:
        """Make the decoders.

        Args:
            kind: The struct of the known fields.
            raw: The fields that stay `msgspec.Raw`. If the object lacks such a field, its value is None.
            strict: Whether unknown fields are refused. Otherwise they are ignored, with one warning for each name.
        """
        forbidding = msgspec.defstruct(
            kind.__name__, [(name, msgspec.Raw, None) for name in raw], bases=(kind,), forbid_unknown_fields=True
        )
        self._kind = cast("type[AnyStruct]", forbidding)
        self._strict = strict
        self._decoder = msgspec.json.Decoder(self._kind)
        self._fields = {
            field.encode_name: (field, msgspec.json.Decoder(field.type)) for field in msgspec.structs.fields(self._kind)
        }
        self._logged: set[str] = set()

    def decode(self, json: Json, path: str = "") -> AnyStruct:
        """Decode an object; `path` is the field that holds the object, empty for the body.

        Raises:
            MalformedRequest: The bytes are not JSON, or the body is not an object.
            UnknownField: A field is unknown, and unknown fields are refused.
            InvalidField: A field is missing or has another type.
        """
        try:
            return self._decoder.decode(json)
        except msgspec.ValidationError:
            return self._decode_fields(json, path)
        except _ERRORS as error:
            raise explain(bytes(json), error, path) from None

    def _decode_fields(self, json: Json, path: str) -> AnyStruct:
        """Decode each known field separately, because the object has an unknown or an invalid field."""
        try:
            values = decode(_OBJECT, json, path)
        except msgspec.ValidationError:
            if path:
                raise InvalidField(path, f"must be an object; was {shown(json)}") from None
            raise MalformedRequest("", f"the body must be a JSON object; was {shown(json)}") from None
        self._check_unknown(values, path)
        found = {}
        for name, (field, decoder) in self._fields.items():
            place = field_path(path, name)
            if (value := values.get(name)) is None:
                if field.required:
                    raise InvalidField(place, f"is required, and must be {_type_name(field.type)}")
                continue
            try:
                found[name] = decode(decoder, value, place)
            except msgspec.ValidationError as error:
                for index in places_of(error):
                    raise InvalidField(
                        f"{place}[{index}]", f"must be a whole number; was {shown_number(value, index)}"
                    ) from None
                raise InvalidField(place, f"must be {_type_name(field.type)}; was {shown(value)}") from None
        return self._kind(**found)

    def _check_unknown(self, values: Mapping[str, msgspec.Raw], path: str) -> None:
        """Refuse or log unknown fields. A field with null counts as missing."""
        every = (name for name, value in values.items() if name not in self._fields and not is_null(value))
        unknown = list(itertools.islice(every, _MAX_LOGGED_NAMES))
        if unknown and self._strict:
            known = ", ".join(sorted(self._fields))
            raise UnknownField(
                field_path(path, unknown[0][:_MAX_SHOWN]), f"is not known; there are {known} (strict_http)"
            )
        for name in unknown:
            short = field_path(_PLACES.sub("[]", path), name[:_MAX_SHOWN])
            if short not in self._logged and len(self._logged) < _MAX_LOGGED_NAMES:
                self._logged.add(short)
                logger.warning("a field over HTTP is ignored", extra={"field": short, "body": self._kind.__name__})


class BodyDecoder(Generic[AnyStruct]):
    """Decodes the bodies of one route, or the objects in one field of the bodies."""

    def __init__(self, kind: type[AnyStruct], settings: Settings, **inputs: InputKind) -> None:
        """Make the decoders.

        Args:
            kind: The struct.
            settings: The settings of the server.
            inputs: The kind of each field with inputs. The field is in the struct or in a struct inside it.
        """
        known = msgspec.structs.fields(kind)
        self._inputs = {it.name: _InputsDecoder(inputs[it.name], settings) for it in known if it.name in inputs}
        self._objects: dict[str, BodyDecoder[Any]] = {
            it.name: BodyDecoder(inner, settings, **inputs)
            for it in known
            if (inner := _struct_of(it.type)) is not None
        }
        self._raw = sorted({**self._inputs, **self._objects}, key=lambda name: name in self._inputs)
        self._object = ObjectDecoder(kind, *self._raw, strict=settings.strict_http)

    async def decode(self, json: Json, hold: Hold, path: str = "") -> AnyStruct:
        """Decode a body, or the object of the field `path`.

        If the inputs have more than 64 KiB of JSON, `hold` is called before and after each input is decoded. The first
        call adds an upper bound of the input's memory. The second call corrects the bound.

        Raises:
            MalformedRequest: The bytes are not JSON, or the body is not an object.
            UnknownField: A field is unknown, and unknown fields are refused.
            InvalidField: A field or an input has another type, or a text is too long.
            TooManyInputs: There are more inputs than a request may hold.
            BudgetFull: The decoded inputs exceed the free budget.
        """
        fields = self._object.decode(json, path)
        if (size := size_of(json)) > TURN_BYTES:
            sent = [value for name in self._raw if (value := getattr(fields, name)) is not None]
            hold((size - sum(map(size_of, sent))) * _TEXT_GROWTH)
        for name in self._raw:
            if (value := getattr(fields, name)) is not None:
                setattr(fields, name, await self._decode_field(name, value, hold, field_path(path, name)))
        return fields

    async def _decode_field(self, name: str, json: msgspec.Raw, hold: Hold, path: str) -> Any:
        form = _FORM.match(json)
        found = None if form is None else form.lastgroup
        if found == "null":
            return None
        if name in self._objects and (found == "object" or name not in self._inputs):
            return await self._objects[name].decode(json, hold, path)
        return await self._inputs[name].decode(json, found, hold, path)


class _InputsDecoder:
    """Decodes the inputs in one field."""

    def __init__(self, kind: InputKind, settings: Settings) -> None:
        self._kind = kind
        self._settings = settings

    async def decode(self, json: msgspec.Raw, form: str | None, hold: Hold, path: str) -> Any:
        """Decode the inputs; `form` is the group of `_FORM` that matches the JSON."""
        kind, settings = self._kind, self._settings
        is_text, is_large = form == "text" and kind.one_text, size_of(json) > TURN_BYTES
        is_one = is_text or (form == "ids" and kind.one_list)
        if is_large:
            await asyncio.sleep(0)
        members = [json] if is_one else list_of(json, path, kind.wanted)
        most = settings.max_request_sequences
        if len(members) > most:
            problem = f"must hold at most {most} sequences (max_request_sequences); was {len(members)}"
            raise TooManyInputs(path, problem)
        inputs: list[Any] = []
        turn_bytes = TURN_BYTES
        for i, member in enumerate(members):
            if is_large:
                turn_bytes += size_of(member)
                if turn_bytes > TURN_BYTES:
                    await asyncio.sleep(0)
                    turn_bytes = 0
                self._reserve(member, hold, path if is_text else f"{path}[{i}]")
            try:
                inputs.append(kind.decoder.decode(member))
            except _ERRORS as error:
                raise self._explain(error, member, path if is_text else f"{path}[{i}]") from None
            if kind.convert is not None:
                inputs[i] = kind.convert(f"{path}[{i}]", inputs[i])
            if is_large:
                hold(self._memory_of(member, inputs[i]) - self._bound_of(member))
        return inputs[0] if is_one else inputs

    def _reserve(self, json: msgspec.Raw, hold: Hold, path: str) -> None:
        """Call `hold` with an upper bound of an input's memory. Refuse a text that is too long."""
        limit, size = self._settings.max_text_bytes, size_of(json)
        is_ids = self._kind.one_list and memoryview(json)[0] == _BRACKET
        if size > limit * _ESCAPE_BYTES + 2 and not is_ids:
            raise InvalidField(path, f"must be at most {limit} bytes (max_text_bytes); was {size} bytes of JSON")
        hold(self._bound_of(json))

    def _bound_of(self, json: msgspec.Raw) -> int:
        return size_of(json) * self._kind.growth

    def _memory_of(self, json: msgspec.Raw, value: Any) -> int:
        """Return the size in memory of a text or of a list of ids. For other values, return the upper bound."""
        if isinstance(value, str):
            return sys.getsizeof(value)
        return len(value) * _ID_BYTES if self._kind.one_list else self._bound_of(json)

    def _explain(self, error: Exception, json: msgspec.Raw, path: str) -> RequestError:
        """Return the error for an input that the decoder of its kind refused."""
        if not isinstance(error, msgspec.ValidationError):
            return explain(bytes(json), error, path)
        for place in places_of(error) if self._kind.one_list else ():
            return InvalidField(f"{path}[{place}]", f"must be a token id; was {shown_number(json, place)}")
        return InvalidField(path, f"must be {self._kind.wanted_each}; was {shown(json)}")


def decode(decoder: msgspec.json.Decoder[AnyJson], json: Json, path: str = "") -> AnyJson:
    """Decode JSON. `path` is the field that holds the JSON; empty for the body.

    Raises:
        ValidationError: The value is not of the decoder's type.
        MalformedRequest: The bytes are not JSON.
        InvalidField: A string has only one half of a surrogate pair.
    """
    try:
        return decoder.decode(json)
    except msgspec.ValidationError:
        raise
    except _ERRORS as error:
        raise explain(bytes(json), error, path) from error


def list_of(json: msgspec.Raw, path: str, wanted: str) -> list[msgspec.Raw]:
    """Return the members of a list, not decoded.

    Raises:
        InvalidField: The JSON is not a list.
    """
    try:
        return decode(_LIST, json, path)
    except msgspec.ValidationError:
        raise InvalidField(path, f"must be {wanted}; was {shown(json)}") from None


def field_path(path: str, name: str) -> str:
    """Return the path of a field. `path` is the path of the object that holds the field; empty for the body."""
    return f"{path}.{name}" if path else name


def size_of(json: Json) -> int:
    """Return the number of bytes of JSON."""
    return memoryview(json).nbytes


def is_null(json: msgspec.Raw) -> bool:
    """Return whether a value is null."""
    return memoryview(json)[:5].tobytes() == b"null"


def shown(json: Json) -> str:
    """Return a JSON value for an error message: the digits of a number, or the type of any other value."""
    value = _VALUE.match(json)
    found = b"" if value is None else value[1]
    return _VALUE_NAMES.get(found) or found.decode()


def places_of(error: msgspec.ValidationError) -> list[int]:
    """Return the list indexes in the path of a wrong value, outermost first. The path is in msgspec's message."""
    return [int(place) for place in _PLACES.findall(str(error).rpartition(" - at `$")[2])]


def value_at(json: msgspec.Raw, places: Sequence[int]) -> msgspec.Raw:
    """Return the value at `places` in nested lists, not decoded."""
    for place in places:
        json = _LIST.decode(json)[place]
    return json


def shown_number(json: Json, place: int) -> str:
    """Return the value at an index of a list of numbers, for an error message.

    All values before this index are numbers, so each comma there separates two values. The function counts commas,
    because a list of `msgspec.Raw` would take much more time and memory.
    """
    data = bytes(json)
    commas = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(","))
    return shown(data[int(commas[place - 1]) + 1 if place else 1 :])


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct among the types of a field."""
    return next((it for it in get_args(kind) if isinstance(it, type) and issubclass(it, msgspec.Struct)), None)


def _type_name(kind: Any) -> str:
    """Return the name of a field's type, for error messages."""
    (plain, *_) = [it for it in get_args(kind) if it is not NoneType] if NoneType in get_args(kind) else [kind]
    return _TYPE_NAMES[plain]
