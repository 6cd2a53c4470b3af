"""JSON to what the server works with: what both protocols have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from encserve_server.errors import InvalidField, MalformedRequest
from encserve_server.http.replies import JSON_GROWTH
from encserve_server.http.status import EmptyInputs, UnknownField
from encserve_server.models.calls import Calls
from encserve_server.models.inputs import SentIds, SentInput
from encserve_server.models.served import EncodeCall, EncodeReply, ServedModel
from encserve_server.models.spans import POOLINGS
from encserve_server.types import Bundle, DataType, Detail, Output, Task

_POOLINGS = {kind.name.lower(): kind for kind in POOLINGS}
_TASKS = {"query": Task.QUERY, "document": Task.DOCUMENT}
_TYPE_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_IDS = np.iinfo(np.int64)


class Fields:
    """The fields of a request; one that is null is not there."""

    def __init__(self, body: bytes) -> None:
        """Parses the body.

        Raises:
            MalformedRequest: It is no JSON object.
        """
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise MalformedRequest("", f"the body is no JSON: {error}") from error
        if not isinstance(data, dict):
            raise MalformedRequest("", f"the body must be a JSON object; was {_shown(data)}")
        self._data: dict[str, Any] = data

    def refuse_others(self, known: frozenset[str]) -> None:
        """Refuses fields that nobody knows.

        Raises:
            UnknownField: There is one.
        """
        if others := self._data.keys() - known:
            raise UnknownField(min(others)[:64], f"is not known; there are {', '.join(sorted(known))}")

    def get(self, name: str) -> Any:
        """A field as it is; None where it is not there."""
        return self._data.get(name)

    def text(self, name: str) -> str | None:
        """A string, or None."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidField(name, f"must be a string; was {_shown(value)}")
        return value

    def flag(self, name: str, default: bool | None) -> bool | None:
        """A boolean."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidField(name, f"must be true or false; was {_shown(value)}")
        return default if value is None else value

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """One of a few strings, in whatever case, or None."""
        value = self.text(name)
        if value is not None and (value := value.lower()) not in choices:
            raise InvalidField(name, f"must be one of {', '.join(choices)}; was {value[:64]!r}")
        return value

    def dimensions(self, width: int) -> int:
        """To how many numbers a vector of so many is cut; 0 for all."""
        value = self._data.get("dimensions")
        if value is None:
            return 0
        if type(value) is not int or not 1 <= value <= width:
            raise InvalidField(
                "dimensions", f"must be a number from 1 to {width}, the numbers of a vector; was {_shown(value)}"
            )
        return value


@dataclass(frozen=True, slots=True)
class SentInputs:
    """The inputs of a request, not looked into.

    Attributes:
        items: Texts and lists of ids, if all is right.
    """

    items: list[Any]

    @classmethod
    def of(cls, fields: Fields, name: str) -> "SentInputs":
        """What a field holds: a text, ids, or a list of those.

        Raises:
            InvalidField: It holds anything else.
            EmptyInputs: There are none.
        """
        value = fields.get(name)
        if isinstance(value, str):
            return cls([value])
        if not isinstance(value, list):
            raise InvalidField(name, f"must be a string, a list of token ids, or a list of these; was {_shown(value)}")
        if not value:
            raise EmptyInputs(name, "must hold at least 1 text; was empty")
        if type(value[0]) is int:
            return cls([value])
        return cls(value)

    def count_tokens(self, longest: int) -> int | None:
        """How many tokens there are if each input has at most `longest`; None where that takes more than counting."""
        if not all(isinstance(it, list) for it in self.items):
            return None
        return sum(min(len(it), longest) for it in self.items)

    def decode(self, longest: int) -> list[SentInput]:
        """The inputs. Of each no more ids are copied than the model can take.

        Raises:
            InvalidField: One is neither a text nor ids.
        """
        return [self._decode(i, it, longest) for i, it in enumerate(self.items)]

    def _decode(self, i: int, it: Any, longest: int) -> SentInput:
        if isinstance(it, str):
            return it
        field = f"inputs[{i}]"
        if not isinstance(it, list):
            raise InvalidField(field, f"must be a string or a list of token ids; was {_shown(it)}")
        ids = it[:longest]
        for place, token_id in enumerate(ids):
            if type(token_id) is not int or not _IDS.min <= token_id <= _IDS.max:
                raise InvalidField(f"{field}[{place}]", f"must be a token id; was {_shown(token_id)}")
        return SentIds(np.array(ids, np.int64), len(it))


def model_of(fields: Fields) -> tuple[str, str]:
    """The name and version of the model that is asked for, NAME or NAME@VERSION; empty for the default."""
    name, _, version = (fields.text("model") or "").partition("@")
    return name, version


async def encode(
    calls: Calls,
    fields: Fields,
    inputs_field: str,
    output: Callable[[Bundle], Output],
    build: Callable[[ServedModel, EncodeReply], bytes],
    *,
    truncate_default: bool,
) -> bytes:
    """Answers a request.

    Args:
        calls: Who answers.
        fields: The request.
        inputs_field: Which of them holds the inputs.
        output: What is wanted of each; called only once the call may be taken, as whatever is dear.
        build: Makes the body.
        truncate_default: Whether inputs are cut where the request does not say.

    Raises:
        InvalidField: A field has a value that it must not have.
        EncserveError: Whatever else `Calls.encode` raises.
    """
    sent = SentInputs.of(fields, inputs_field)
    model = calls.resolve(len(sent.items), *model_of(fields))
    longest = model.bundle.max_sequence_tokens

    def decode() -> EncodeCall:
        wanted = output(model.bundle)
        return EncodeCall(
            inputs=sent.decode(longest),
            outputs=(wanted,),
            truncate=bool(fields.flag("truncate", truncate_default)),
            exclude_special_tokens=False,
            include_token_strings=False,
            prompt_name=fields.text("prompt_name"),
            task=task_of(fields, model.bundle),
            detail=Detail.COUNTS,
        )

    return await calls.encode(
        model,
        len(sent.items),
        math.inf,
        count_tokens=lambda: sent.count_tokens(longest),
        decode=decode,
        build=lambda _, reply: build(model, reply),
        growth=JSON_GROWTH,
    )


def pooled_output(fields: Fields, bundle: Bundle, normalize_default: Callable[[Bundle], bool]) -> Output:
    """The one vector that a request asks for of each input.

    Raises:
        InvalidField: A field has a value that it must not have, or the model does not say how it pools.
    """
    pooling = fields.choice("pooling", tuple(_POOLINGS))
    normalize = fields.flag("normalize", None)
    normalize = normalize_default(bundle) if normalize is None else normalize
    if pooling is not None:
        return Output(_POOLINGS[pooling], normalize, DataType.FLOAT32, fields.dimensions(bundle.d_model))
    if bundle.pooling is None:
        raise InvalidField(
            "model",
            f"{bundle.name} does not say how it was trained to make one vector of a text; name a way in the field "
            f"pooling: {', '.join(_POOLINGS)}",
        )
    return bundle.pooling.output(normalize, DataType.FLOAT32, fields.dimensions(bundle.pooling.width))


def task_of(fields: Fields, bundle: Bundle) -> Task:
    """What the texts are.

    Raises:
        InvalidField: The model does not know such texts.
    """
    name = fields.choice("task", tuple(_TASKS))
    if name is None:
        return Task.NEITHER
    if _TASKS[name] not in bundle.tasks:
        known = ", ".join(it.name.lower() for it in bundle.tasks) or "none: it treats all texts alike"
        raise InvalidField("task", f"model {bundle.name} does not know {name}; it knows {known}")
    return _TASKS[name]


def _shown(value: Any) -> str:
    """A value for an error: of a number itself, of anything else its type."""
    return _TYPE_NAMES.get(type(value)) or f"{value}"[:64]
