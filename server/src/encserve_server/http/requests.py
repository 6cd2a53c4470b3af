"""JSON to what the server works with: what the protocols have in common.

A body is decoded into the struct of its route in one go. Only where that fails is it looked into: for fields that the
route does not know, and for what is wrong, to name it.
"""

import array
import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from encserve_server.calls import Call
from encserve_server.errors import (
    EmptyInputs,
    InvalidField,
    MalformedRequest,
    SequenceTooLong,
    TooManyInputs,
    UnknownField,
)
from encserve_server.http import kinds
from encserve_server.http.app import Reply
from encserve_server.http.counting import COUNTED_BYTES, CountLimits, check_counts
from encserve_server.http.json_errors import explain
from encserve_server.http.replies import JSON_GROWTH
from encserve_server.models.inputs import SentIds, SentInput
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.models.treatment import EncodeCall
from encserve_server.outputs import SPAN_POOLINGS, OutputSpec
from encserve_server.types.bundles import Bundle
from encserve_server.types.callers import PRIORITIES, Priority
from encserve_server.types.requests import DataType, Detail, OutputKind, Task

logger = logging.getLogger(__name__)

Inputs = str | list[str | int | list[int]]

_POOLINGS = {kind.name.lower(): kind for kind in SPAN_POOLINGS}
# How many inputs of a request were cut.
TRUNCATED_HEADER = "encserve-truncated-inputs"
_TASKS = {"query": Task.QUERY, "document": Task.DOCUMENT}
# What other servers call the tasks.
_INPUT_TYPES = {
    "query": Task.QUERY,
    "search_query": Task.QUERY,
    "document": Task.DOCUMENT,
    "passage": Task.DOCUMENT,
    "search_document": Task.DOCUMENT,
}
_SIDES = ("right", "left")
# Of vectors that are compared by these, lengths matter.
_NOT_COSINE = frozenset({"dot", "euclidean", "manhattan"})
# So many names of unknown fields are logged for a route.
_MOST_WARNED = 64
_MAX_SHOWN = 64
_COUNTS = ReplyShape(Detail.COUNTS)
_TYPE_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", NoneType: "null"}
_WANTED: dict[Any, tuple[type, str]] = {
    str | None: (str, "a string"),
    bool | None: (bool, "true or false"),
    int | None: (int, "a whole number"),
    list[str] | None: (list, "a list of strings"),
    list[Any] | None: (list, "a list"),
}
# A larger body is decoded when no other one that large is.
_ALONE_BYTES = 1024 * 1024
# What an id takes as one of Python's numbers, and its place in a list.
_ID_BYTES = 36
# So much of it is decoded before others have a turn.
_TURN_BYTES = 64 * 1024
# So many bytes is what JSON decodes to, at most, for each of its own: a text of 4 bytes a character, ids of 1 or 2.
_DECODED_GROWTH = 14
# So many bytes of JSON stand for a byte of text, at most: \u0041 is an A.
_MOST_ESCAPED = 6


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that all routes with inputs have; one that is null is not there.

    Attributes:
        model: NAME, NAME@VERSION or another name of a model, as /v1/models lists them. Default: the first one.
        prompt_name: Which of the model's prompts is put before every text; "" for none. Default: the task's or the
            model's.
        task: What the texts are, query or document, for models that treat them differently.
        input_type: As task, in the words of other servers: query, search_query, document, passage, search_document. It
            changes nothing for a model without tasks, nor does any other value.
    """

    model: str | None = None
    prompt_name: str | None = None
    task: str | None = None
    input_type: str | None = None


class EncodeBody(Body):
    """Those of the routes with vectors.

    Attributes:
        truncate: Whether texts that are too long are cut at their end, or refused. Default: cut, unless the server is
            set otherwise.
        truncate_prompt_tokens: To how many tokens texts are cut, special ones included; -1 for as many as the model
            takes.
        priority: interactive, or bulk for a job, which runs in what interactive requests leave. Default: interactive.
    """

    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: str | None = None


class PooledBody(EncodeBody):
    """Those of the routes with one vector for each input.

    Attributes:
        dimensions: To how many of its first numbers a vector is cut.
        normalize: Whether vectors are scaled to length 1.
        pooling: How the vectors of tokens become one, in place of how the model was trained to: mean, cls, max,
            last_token, weighted_mean or mean_sqrt_length.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    pooling: str | None = None


AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)
AnyJson = TypeVar("AnyJson")


@dataclass(frozen=True, slots=True)
class BodyRules:
    """How bodies are read, on all routes.

    Attributes:
        limits: How many values a body may hold.
        max_text_bytes: The longest text, in bytes of UTF-8.
        truncate: Whether texts that are too long are cut where a request does not say.
        strict: Whether fields that a route does not know are refused.
        turn: Held while a very large body is decoded: steps of several at once would hold up others as one long step.
    """

    limits: CountLimits
    max_text_bytes: int
    truncate: bool = True
    strict: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def turn_of(self, body: bytes) -> contextlib.AbstractAsyncContextManager[None]:
        """What a body is decoded in: a large one when no other one that large is."""
        return self.turn if len(body) > _ALONE_BYTES else contextlib.nullcontext()


class IgnoredFields:
    """The unknown fields of one kind of body that have been logged."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        """Takes the struct of the fields that are known."""
        self._kind = kind
        self._logged: set[str] = set()

    def log(self, names: Sequence[str]) -> None:
        """Logs names that have not been logged, as many as are of use."""
        for name in names:
            shown = name[:_MAX_SHOWN]
            if shown not in self._logged and len(self._logged) < _MOST_WARNED:
                self._logged.add(shown)
                logger.warning("a field over HTTP is ignored", extra={"field": shown, "body": self._kind.__name__})


class BodyDecoder(Generic[AnyBody]):
    """Decodes the bodies of one route."""

    def __init__(self, kind: type[AnyBody], inputs_field: str, rules: BodyRules) -> None:
        """Takes the struct of its fields, which forbids others, and which of them holds the inputs."""
        self._kind = kind
        self._inputs_field = inputs_field
        self._rules = rules
        self._decoder = msgspec.json.Decoder(kind)
        most = msgspec.Meta(max_length=rules.limits.sequences)
        self._members: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(
            Annotated[list[msgspec.Raw], most]
        )
        self._ignored = IgnoredFields(kind)

    async def decode(self, body: bytes, hold: Callable[[int], None]) -> AnyBody:
        """The fields of a body; `hold` is called with the bytes that the inputs of a large one take.

        Raises:
            BudgetFull: `hold` has no room for them.
            MalformedRequest: It is no JSON object.
            UnknownField: There is a field that the route does not know, and fields are read strictly.
            InvalidField: A field is not of its type.
            EncserveError: Whatever `check_counts` raises.
        """
        if len(body) > COUNTED_BYTES:
            await check_counts(body, self._inputs_field, self._rules.limits)
        else:
            with contextlib.suppress(msgspec.ValidationError):  # a field is not known, or wrong
                return decoded(self._decoder, body)
        async with self._rules.turn_of(body):
            return await self._decode_known(body, hold)

    async def _decode_known(self, body: bytes, hold: Callable[[int], None]) -> AnyBody:
        """The fields of a body, without those that the route does not know."""
        values = self._values(body)
        sent = values.pop(self._inputs_field, None)
        fields = _fields(self._kind)
        if (size := sum(memoryview(it).nbytes for it in values.values())) > _TURN_BYTES:
            hold(size * _DECODED_GROWTH)
        found = {name: _plain(it) if name in fields else it for name, it in values.items()}
        if sent is not None:
            found[self._inputs_field] = await self._decoded_inputs(sent, hold)
        known = self._known(found, self._kind)
        try:
            return msgspec.convert(known, self._kind)
        except msgspec.ValidationError:
            self._explain(known, self._kind)
        raise MalformedRequest("", "the body is not as docs/http.md has it")

    async def _decoded_inputs(self, sent: msgspec.Raw, hold: Callable[[int], None]) -> Any:
        """What the field of inputs holds, decoded in turns: all of it at once would hold up others for 0.1 s.

        Raises:
            BudgetFull: `hold` has no room for it.
            MalformedRequest: It is no JSON.
            TooManyInputs: It holds more inputs than a request may.
            InvalidField: A text is too long, whatever its escapes stand for.
        """
        name, size = self._inputs_field, memoryview(sent).nbytes
        if size <= _TURN_BYTES:
            return _decoded_input(sent, name)
        if not _LIST_OF_INPUTS.match(memoryview(sent)):
            self._check_text(name, sent)
            hold(size * _DECODED_GROWTH)
            return _decoded_input(sent, name)
        await asyncio.sleep(0)
        try:
            members = self._members.decode(sent)
        except msgspec.ValidationError:
            problem = f"must hold at most {self._rules.limits.sequences} sequences (max_http_inputs); was more"
            raise TooManyInputs(name, problem) from None
        inputs: list[Any] = []
        turn_bytes = size = 0
        for i, member in enumerate(members):
            self._check_text(f"{name}[{i}]", member)
            inputs.append(it := _decoded_input(member, f"{name}[{i}]"))
            size += _size(it)
            turn_bytes += memoryview(member).nbytes
            if turn_bytes > _TURN_BYTES:
                hold(size)
                await asyncio.sleep(0)
                turn_bytes = size = 0
        hold(size)
        return inputs

    def _check_text(self, path: str, sent: msgspec.Raw) -> None:
        """Raises InvalidField for a string that is too long before any of it is decoded."""
        limit, size = self._rules.max_text_bytes, memoryview(sent).nbytes
        if size > limit * _MOST_ESCAPED + 2 and bytes(memoryview(sent)[:1]) == b'"':
            raise InvalidField(path, f"must be at most {limit} bytes (max_text_bytes); was {size} bytes of JSON")

    def _values(self, body: bytes) -> dict[str, msgspec.Raw]:
        """The fields of a body, not decoded."""
        try:
            return decoded(_OBJECT, body)
        except msgspec.ValidationError:
            shown = _shown(_plain(body))
            raise MalformedRequest("", f"the body must be a JSON object; was {shown}") from None

    def _known(self, values: Mapping[str, Any], kind: type[msgspec.Struct], at: str = "") -> dict[str, Any]:
        """The fields of an object that its struct has; of the objects in it the same."""
        fields = _fields(kind)
        unknown = sorted(name for name in values.keys() - fields.keys() if not _is_null(values[name]))
        if unknown and self._rules.strict:
            raise UnknownField(
                f"{at}{unknown[0][:_MAX_SHOWN]}", f"is not known; there are {', '.join(sorted(fields))} (strict_http)"
            )
        self._ignored.log([f"{at}{name}" for name in unknown])
        known = {name: value for name, value in values.items() if name in fields}
        for name, value in known.items():
            if type(value) is dict and (part := _struct_of(fields[name])):
                known[name] = self._known(value, part, f"{at}{name}.")
        return known

    def _explain(self, values: Mapping[str, Any], kind: type[msgspec.Struct], at: str = "") -> None:
        """Raises what is wrong with the fields of an object that is not as its struct wants it, if it is one of them.

        Raises:
            InvalidField: A field is not of its type.
        """
        # Inputs come last: a million ids take 0.1 s.
        for name, its_kind in sorted(_fields(kind).items(), key=lambda it: it[0] == self._inputs_field):
            value, path, part = values.get(name), f"{at}{name}", _struct_of(its_kind)
            if part is not None and type(value) is dict:
                self._explain(value, part, f"{path}.")
            elif name == self._inputs_field and str in get_args(its_kind):
                _check_inputs(path, value)
            elif part is not None and value is not None:
                raise InvalidField(path, f"must be an object; was {_shown(value)}")
            elif value is not None and its_kind in _WANTED and type(value) is not _WANTED[its_kind][0]:
                raise InvalidField(path, f"must be {_WANTED[its_kind][1]}; was {_shown(value)}")
            elif its_kind == list[str] | None and value is not None:
                _check_strings(path, value)


class SentInputs:
    """The inputs of a request: texts and lists of ids, not looked into before `decode`, which may be called once.

    Attributes:
        items: The inputs.
        closing: The ids that all lists of ids end with, and keep where they are cut.
    """

    def __init__(self, field: str, value: Inputs | None) -> None:
        """Takes the field that holds a text, ids, or a list of those.

        Raises:
            InvalidField: It holds nothing.
            EmptyInputs: There are no inputs.
        """
        self._field = field
        if value is None:
            raise InvalidField(field, f"{_INPUTS_PROBLEM}; was null")
        if isinstance(value, list) and not value:
            raise EmptyInputs(field, "must hold at least 1 text; was empty")
        self.items: list[Any] = [value] if isinstance(value, str) or type(value[0]) is int else value
        self.closing: tuple[int, ...] = ()

    def decode(self, longest: int) -> list[SentInput]:
        """The inputs. Of each no more ids are copied than the model can take, and lists of ids are emptied.

        Raises:
            InvalidField: One is neither a text nor ids.
        """
        return [self._decode(i, it, longest) for i, it in enumerate(self.items)]

    def texts(self) -> list[str]:
        """The inputs, which must be texts.

        Raises:
            InvalidField: One is not.
        """
        _check_strings(self._field, self.items)
        return self.items

    def _decode(self, i: int, it: Any, longest: int) -> SentInput:
        if isinstance(it, str):
            return it
        field = f"{self._field}[{i}]"
        if not isinstance(it, list):
            raise InvalidField(field, f"{_INPUT_PROBLEM}; was {_shown(it)}")
        try:
            ids = array.array("q", it[:longest])
        except (TypeError, OverflowError):
            _check_ids(field, it[:longest])
            raise
        count = len(it)
        it.clear()  # Python's numbers take 7 times as much memory as they took in the body
        return SentIds(np.array(ids, np.int64), count)


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INPUT = msgspec.json.Decoder(str | list[int])
_ANYTHING = msgspec.json.Decoder(Any)
_LIST_OF_INPUTS = re.compile(rb'\[\s*["[]')
_INPUTS_PROBLEM = "must be a string, a list of token ids, or a list of these"
_INPUT_PROBLEM = "must be a string or a list of token ids"
_IDS = np.iinfo(np.int64)


def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields, by name."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The struct among the types that a field takes, for an object in a body."""
    return next((it for it in get_args(kind) if isinstance(it, type) and issubclass(it, msgspec.Struct)), None)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, msgspec.Raw) and bytes(value) == b"null")


def _check_strings(field: str, values: Sequence[Any]) -> None:
    """Raises InvalidField for the first of a list that is no string."""
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise InvalidField(f"{field}[{i}]", f"must be a string; was {_shown(value)}")


def _check_inputs(field: str, value: Any) -> None:
    """Raises InvalidField for what is neither a text, nor ids, nor a list of those."""
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise InvalidField(field, f"{_INPUTS_PROBLEM}; was {_shown(value)}")
    if value and type(value[0]) is int:
        value = [value]
    for i, it in enumerate(value):
        if isinstance(it, list):
            _check_ids(f"{field}[{i}]", it)
        elif not isinstance(it, str):
            raise InvalidField(f"{field}[{i}]", f"{_INPUT_PROBLEM}; was {_shown(it)}")


def _check_ids(field: str, ids: list[Any]) -> None:
    """Raises InvalidField for the first of a list that is no id."""
    for place, token_id in enumerate(ids):
        if type(token_id) is not int or not _IDS.min <= token_id <= _IDS.max:
            raise InvalidField(f"{field}[{place}]", f"must be a token id; was {_shown(token_id)}")


def choice(field: str, value: str | None, choices: Collection[str]) -> str | None:
    """One of a few strings, in whatever case, or None.

    Raises:
        InvalidField: It is another.
    """
    if value is not None and (value := value.lower()) not in choices:
        raise InvalidField(field, f"must be one of {', '.join(choices)}; was {value[:64]!r}")
    return value


def is_left(field: str, side: str | None) -> bool:
    """Whether texts that are too long are to be cut at their beginning.

    Raises:
        InvalidField: It is neither left nor right.
    """
    return choice(field, side, _SIDES) == "left"


def positive(field: str, value: int | None) -> int:
    """A number from 1, or 0 where there is none.

    Raises:
        InvalidField: It is less.
    """
    if value is not None and value < 1:
        raise InvalidField(field, f"must be at least 1; was {_shown(value)}")
    return value or 0


def model_of(body: Body) -> tuple[str, str]:
    """The name and version of the model that is asked for, NAME or NAME@VERSION; empty for the default."""
    name, _, version = (body.model or "").partition("@")
    return name, version


def priority_of(body: EncodeBody) -> Priority:
    """How urgent a request says it is.

    Raises:
        InvalidField: It is no priority.
    """
    return PRIORITIES[choice("priority", body.priority, PRIORITIES) or "interactive"]


def task_of(body: Body, bundle: Bundle) -> Task:
    """What the texts are.

    `task` is for models that know it; `input_type`, which many clients always send, changes nothing for others.

    Raises:
        InvalidField: The task is not one of the tasks, or `input_type` is another one.
    """
    said = _INPUT_TYPES.get((body.input_type or "").lower(), Task.NEITHER)
    if (name := choice("task", body.task, _TASKS)) is None:
        return said if said in bundle.tasks else Task.NEITHER
    if said not in (Task.NEITHER, _TASKS[name]):
        problem = f"must not say otherwise than task, which is {name}; was {body.input_type!r}"
        raise InvalidField("input_type", problem)
    return _TASKS[name]


def cut_of(body: EncodeBody, bundle: Bundle, rules: BodyRules) -> tuple[bool, int]:
    """Whether inputs that are too long are cut, and to how many tokens; 0 for as many as the model takes.

    Raises:
        InvalidField: The number is out of range.
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return (rules.truncate if body.truncate is None else body.truncate), 0
    if body.truncate is False:
        raise InvalidField(
            "truncate_prompt_tokens", f"was {asked}, which cuts texts, and truncate was false: send one of them"
        )
    if asked != -1 and not 1 <= asked <= bundle.max_sequence_tokens:
        raise InvalidField(
            "truncate_prompt_tokens",
            f"must be from 1 to {bundle.max_sequence_tokens} (max_sequence_tokens of {bundle.name}), or -1 for as many "
            f"as that; was {asked}",
        )
    return True, max(asked, 0)


async def encode(
    call: Call,
    body: EncodeBody,
    sent: SentInputs,
    output: Callable[[Bundle], OutputSpec],
    build: Callable[[ServedModel, EncodeReply], bytes],
    rules: BodyRules,
    *,
    check: Callable[[ServedModel], None] = lambda _: None,
    growth: float = JSON_GROWTH,
    more_bytes: int = 0,
    from_left: bool = False,
    data_types: Sequence[DataType] = (DataType.FLOAT32,),
    cut: tuple[bool, int] | None = None,
) -> Reply:
    """Answers a request.

    Args:
        call: The call.
        body: The request.
        sent: Its inputs.
        output: What is wanted of each.
        build: Makes the answer's body.
        rules: How bodies are read.
        check: Refuses what the model does not take.
        growth: How many bytes of the answer's body there are at most for each byte of the reply.
        more_bytes: How many bytes of the answer's body, at most, are not made of the reply's rows.
        from_left: Whether texts that are too long are to be cut at their beginning, which this server does not do:
            such a text is refused.
        data_types: The types that the output is wanted in; the reply has one output for each.
        cut: As `cut_of` returns it, where the request's own fields do not say.

    Raises:
        InvalidField: A field has a value that it must not have.
        SequenceTooLong: An input is too long, and may not be cut, or only at its beginning.
        EncserveError: Whatever else `Call.encode_in_parts` raises.
    """
    model = call.resolve(len(sent.items), *model_of(body))
    bundle, truncated = model.bundle, 0
    model.check_counts(len(sent.items), most_inputs=rules.limits.sequences)
    check(model)
    truncate, max_tokens = cut_of(body, bundle, rules) if cut is None else cut
    wanted = output(bundle)
    request = EncodeCall(
        inputs=sent.decode(bundle.max_sequence_tokens),
        outputs=tuple(wanted._replace(data_type=it) for it in data_types),
        truncate=truncate and not from_left,
        max_tokens=max_tokens,
        prompt_name=body.prompt_name,
        task=task_of(body, bundle),
        shape=_COUNTS,
        priority=priority_of(body),
        closing=sent.closing,
    )

    def counted(reply: EncodeReply) -> bytes:
        nonlocal truncated
        truncated = sum(it.truncated for it in reply.sequences)
        return build(model, reply)

    try:
        answer = await call.encode_in_parts(model, request, counted, growth, more_bytes)
    except SequenceTooLong as error:
        raise _too_long_on_the_left(error) if from_left else error from None
    return Reply(answer, {TRUNCATED_HEADER: f"{truncated}"} if truncated else {})


def _too_long_on_the_left(error: SequenceTooLong) -> SequenceTooLong:
    problem = "must be at most {limit} tokens, because this server cuts texts only at their end; was {count}. Ask for "
    return SequenceTooLong(error.field, problem + "truncation on the right, or split it", **error.values)


def pooled_output(body: PooledBody, bundle: Bundle, *, normalize_default: bool | None = None) -> OutputSpec:
    """The one vector that a request asks for of each input.

    Without a default vectors are scaled to length 1, as OpenAI's are, unless lengths matter to how they are compared.

    Raises:
        InvalidField: A field has a value that it must not have, or the model does not say how it pools.
    """
    pooling = choice("pooling", body.pooling, _POOLINGS)
    if pooling is None and bundle.pooling is None:
        if kinds.trained_for(bundle):
            raise kinds.lacks(bundle, kinds.EMBEDDING)
        raise InvalidField(
            "model",
            f"{bundle.name} does not say how it was trained to make one vector of a text; name a way in the field "
            f"pooling: {', '.join(_POOLINGS)}",
        )
    if normalize_default is None:
        normalize_default = bundle.similarity not in _NOT_COSINE
    return OutputSpec(
        OutputKind.MODEL if pooling is None else _POOLINGS[pooling],
        normalize_default if body.normalize is None else body.normalize,
        dimensions=positive("dimensions", body.dimensions),
    )


def decoded(decoder: msgspec.json.Decoder[AnyJson], json: bytes | msgspec.Raw, path: str = "") -> AnyJson:
    """Decode JSON; `path` is the field that has it, empty for the body.

    Raises:
        ValidationError: The value is not of the decoder's type.
        MalformedRequest: The bytes are not JSON.
        InvalidField: A string has half of a surrogate pair.
    """
    try:
        return decoder.decode(json)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain(bytes(json), error, path) from error


def _plain(json: bytes | msgspec.Raw) -> Any:
    """Any JSON as plain objects.

    Raises:
        MalformedRequest: It is no JSON, or holds a number that Python cannot.
    """
    try:
        return decoded(_ANYTHING, json)
    except msgspec.ValidationError as error:
        raise MalformedRequest("", f"the body is not valid JSON: {error}") from error


def _size(it: Any) -> int:
    """How many bytes a text or a list of ids takes."""
    return len(it) * _ID_BYTES if isinstance(it, list) else sys.getsizeof(it)


def _decoded_input(sent: msgspec.Raw, path: str) -> Any:
    try:
        return decoded(_INPUT, sent, path)
    except msgspec.ValidationError:
        return _plain(sent)


def _shown(value: Any) -> str:
    """A value for an error: of a number itself, of anything else its type."""
    return _TYPE_NAMES.get(type(value)) or _shown_number(value)


def _shown_number(value: float) -> str:
    try:
        return f"{value}"[:64]
    except ValueError:  # Python does not write down a whole number of thousands of digits
        return "a very large number"
