"""The fields that the requests of all JSON protocols have, and the function that answers a decoded request."""

import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from encserve_server.calls import Call
from encserve_server.endpoints.routes import Reply
from encserve_server.errors import EmptyInputs, InvalidField, SequenceTooLong
from encserve_server.models.inputs import SentIds, SentInput
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.models.treatment import EncodeCall
from encserve_server.outputs import SPAN_POOLINGS, OutputSpec
from encserve_server.protocols.http_json import kinds
from encserve_server.protocols.http_json.replies import JSON_GROWTH
from encserve_server.settings import Settings
from encserve_server.types.bundles import Bundle
from encserve_server.types.callers import PRIORITIES, Priority
from encserve_server.types.requests import DataType, Detail, OutputKind, Task

Inputs = str | list[str | int | list[int]]

# This header has the number of truncated inputs.
TRUNCATED_HEADER = "encserve-truncated-inputs"
_POOLINGS = {kind.name.lower(): kind for kind in SPAN_POOLINGS}
_TASKS = {"query": Task.QUERY, "document": Task.DOCUMENT}
# Other servers' names of tasks.
_INPUT_TYPES = {
    "query": Task.QUERY,
    "search_query": Task.QUERY,
    "document": Task.DOCUMENT,
    "passage": Task.DOCUMENT,
    "search_document": Task.DOCUMENT,
}
_SIDES = ("right", "left")
# These similarity measures depend on the Euclidean length of the vectors.
_LENGTH_MATTERS = frozenset({"dot", "euclidean", "manhattan"})
_MAX_SHOWN = 64
_COUNTS = ReplyShape(Detail.COUNTS)


class ModelBody(msgspec.Struct):
    """The fields of all routes with inputs. A field with null counts as absent.

    Attributes:
        model: NAME, NAME@VERSION or another name in the list of /v1/models. Default: the first model.
        prompt_name: The name of the model's prompt that is put before every text; "" for no prompt. Default: the
            prompt of the task or of the model.
    """

    model: str | None = None
    prompt_name: str | None = None


class Body(ModelBody):
    """The fields of all routes that encode or tokenize inputs.

    Attributes:
        task: query or document, for models that treat queries and documents differently. Other models refuse the field.
        input_type: The same as task, with the names of other servers: query, search_query, document, passage,
            search_document. Other values have no effect. If the model has no tasks, no value has an effect. If both
            fields are sent, they must not contradict each other.
    """

    task: str | None = None
    input_type: str | None = None


class EncodeBody(Body):
    """The fields of all routes with vectors.

    Attributes:
        truncate: Whether texts that are too long are truncated at their end. Otherwise they are refused. Default: true,
            or false if the server runs with http_truncate off.
        truncate_prompt_tokens: Truncates texts to this number of tokens, special tokens included; -1 for as many
            tokens as the model takes.
        priority: interactive or bulk. Bulk requests are for jobs. While both wait, bulk gets one ninth of the work.
            Default: interactive.
    """

    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: str | None = None


class PooledBody(EncodeBody):
    """The fields of all routes with one vector for each input.

    Attributes:
        dimensions: Truncates vectors to this number of dimensions.
        normalize: Whether vectors are scaled to Euclidean length 1.
        pooling: How one vector is computed from the vectors of the tokens: mean, cls, max, last_token, weighted_mean or
            mean_sqrt_length. Default: as the model was trained.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    pooling: str | None = None


class SentInputs:
    """The inputs of a request: texts and lists of ids.

    Attributes:
        items: The inputs.
        closing: The special tokens at the end of each list of ids. A truncated list still ends with these tokens.
    """

    def __init__(self, field: str, value: str | list[Any] | None) -> None:
        """Keep the value of the field: a text, ids, or a list of these.

        Raises:
            InvalidField: The value is missing.
            EmptyInputs: The list is empty.
        """
        if value is None:
            raise InvalidField(field, "is required: send a text, or a list of texts or ids; was null")
        if not value and isinstance(value, list):
            raise EmptyInputs(field, "must hold at least 1 text; was empty")
        self.items: list[Any] = [value] if isinstance(value, str) or type(value[0]) is int else value
        self.closing: tuple[int, ...] = ()

    def decode(self, longest: int) -> list[SentInput]:
        """Return the inputs, with at most `longest` ids of each. The lists of ids are empty afterwards."""
        return [it if isinstance(it, str) else _ids_of(it, longest) for it in self.items]


def _ids_of(ids: list[int], longest: int) -> SentIds:
    kept = array.array("q", ids[:longest])
    count = len(ids)
    ids.clear()  # a list of Python numbers takes several times the memory of the array
    return SentIds(np.array(kept, np.int64), count)


def choice(field: str, value: str | None, choices: Collection[str]) -> str | None:
    """Check that a value is one of a few strings, and return it in lower case; None stays None.

    Raises:
        InvalidField: The value is another string.
    """
    if value is not None and (value := value.lower()) not in choices:
        raise InvalidField(field, f"must be one of {', '.join(choices)}; was {value[:_MAX_SHOWN]!r}")
    return value


def is_left(field: str, side: str | None) -> bool:
    """Return whether a request wants too long texts truncated at their beginning.

    Raises:
        InvalidField: The side is neither left nor right.
    """
    return choice(field, side, _SIDES) == "left"


def positive(field: str, value: int | None) -> int:
    """Check that a number is at least 1, and return it; 0 for None.

    Raises:
        InvalidField: The number is less than 1.
    """
    if value is not None and value < 1:
        raise InvalidField(field, f"must be at least 1; was {first_digits(value)}")
    return value or 0


def first_digits(value: int) -> str:
    """Return the first digits of a number of a request, for an error message. A request may have 4,300 digits."""
    return f"{value}"[:_MAX_SHOWN]


def model_of(body: ModelBody) -> tuple[str, str]:
    """Return the name and the version of the model in a request, empty for the default."""
    name, _, version = (body.model or "").partition("@")
    return name, version


def priority_of(name: str | None) -> Priority:
    """Return the priority with the name in a request.

    Raises:
        InvalidField: The priority is unknown.
    """
    return PRIORITIES[choice("priority", name, PRIORITIES) or "interactive"]


def task_of(body: Body, bundle: Bundle) -> Task:
    """Return the task of the texts.

    Many clients always send `input_type`, so the field changes nothing for models without tasks.

    Raises:
        InvalidField: The task is unknown, or `input_type` names another task.
    """
    said = _INPUT_TYPES.get((body.input_type or "").lower(), Task.NEITHER)
    if (name := choice("task", body.task, _TASKS)) is None:
        return said if said in bundle.tasks else Task.NEITHER
    if said not in (Task.NEITHER, _TASKS[name]):
        problem = f"must not contradict task, which is {name}; was {body.input_type!r}"
        raise InvalidField("input_type", problem)
    return _TASKS[name]


def cut_of(truncate: bool | None, asked: int | None, bundle: Bundle, settings: Settings) -> tuple[bool, int]:
    """Return whether too long inputs are truncated, and to which number of tokens; 0 means the model's limit.

    Args:
        truncate: The field truncate.
        asked: The field truncate_prompt_tokens.
        bundle: The model.
        settings: The settings of the server.

    Raises:
        InvalidField: The number of tokens is out of range.
    """
    if asked is None:
        return (settings.http_truncate if truncate is None else truncate), 0
    number = first_digits(asked)
    if truncate is False:
        raise InvalidField(
            "truncate_prompt_tokens", f"must be left out if truncate is false; was {number}. Send only one of the two"
        )
    if asked != -1 and not 1 <= asked <= bundle.max_sequence_tokens:
        raise InvalidField(
            "truncate_prompt_tokens",
            f"must be from 1 to {bundle.max_sequence_tokens} (max_sequence_tokens of {bundle.name}), or -1 for the "
            f"maximum; was {number}",
        )
    return True, max(asked, 0)


async def encode(
    call: Call,
    body: EncodeBody,
    sent: SentInputs,
    output: Callable[[Bundle], OutputSpec],
    build: Callable[[ServedModel, EncodeReply], bytes],
    settings: Settings,
    *,
    check: Callable[[ServedModel], None] = lambda _: None,
    growth: float = JSON_GROWTH,
    more_bytes: int = 0,
    from_left: bool = False,
    data_types: Sequence[DataType] = (DataType.FLOAT32,),
    cut: tuple[bool, int] | None = None,
) -> Reply:
    """Encode the inputs of a request, and return the reply.

    Args:
        call: The call.
        body: The fields of the request.
        sent: The inputs of the request.
        output: Returns the specification of the output.
        build: Writes the body of the reply.
        settings: The settings of the server.
        check: Refuses inputs that the model does not take.
        growth: The maximum number of bytes in the reply's body for each byte of vectors.
        more_bytes: The maximum number of bytes in the reply's body that are not vectors.
        from_left: Whether the request wants too long texts truncated at their beginning. This server cannot do this, so
            it refuses such texts.
        data_types: The types of the output. The reply has one output for each type.
        cut: Replaces the result of `cut_of`, for protocols with other fields for truncation.

    Raises:
        InvalidField: A field has a wrong value.
        SequenceTooLong: An input is too long, and the request does not allow truncation at the end.
        EncserveError: See `Call.encode`.
    """
    model = call.resolve(len(sent.items), *model_of(body))
    bundle, truncated = model.bundle, 0
    model.check_counts(len(sent.items))
    check(model)
    if cut is None:
        cut = cut_of(body.truncate, body.truncate_prompt_tokens, bundle, settings)
    truncate, max_tokens = cut
    wanted = output(bundle)
    request = EncodeCall(
        inputs=sent.decode(bundle.max_sequence_tokens),
        outputs=tuple(wanted._replace(data_type=it) for it in data_types),
        truncate=truncate and not from_left,
        max_tokens=max_tokens,
        prompt_name=body.prompt_name,
        task=task_of(body, bundle),
        shape=_COUNTS,
        priority=priority_of(body.priority),
        closing=sent.closing,
    )

    def counted(reply: EncodeReply) -> bytes:
        nonlocal truncated
        truncated = sum(it.truncated for it in reply.sequences)
        return build(model, reply)

    try:
        answer = await call.encode(model, request, counted, growth, more_bytes)
    except SequenceTooLong as error:
        raise too_long_on_the_left(error) if from_left else error from None
    return Reply(answer, {TRUNCATED_HEADER: f"{truncated}"} if truncated else {})


def too_long_on_the_left(error: SequenceTooLong) -> SequenceTooLong:
    """Return the error for a text that the request wants truncated at its beginning."""
    problem = (
        "must be at most {limit} tokens, because this server truncates texts only at their end; was {count}. Ask for "
        "truncation on the right, or split the text"
    )
    return SequenceTooLong(error.field, problem, **error.values)


def pooled_output(body: PooledBody, bundle: Bundle, *, normalize_default: bool | None = None) -> OutputSpec:
    """Return the specification of an output with one vector for each input.

    The field normalize decides whether vectors are scaled to Euclidean length 1. Without this field,
    `normalize_default` decides. By default, vectors are scaled, as OpenAI's vectors are, unless the model's similarity
    depends on the length.

    Raises:
        InvalidField: A field has a wrong value, or the model was not trained with a pooling.
    """
    pooling = choice("pooling", body.pooling, _POOLINGS)
    if pooling is None and bundle.pooling is None:
        if kinds.trained_for(bundle):
            raise kinds.lacks(bundle, kinds.EMBEDDING)
        raise InvalidField(
            "model",
            f"{bundle.name} was not trained with a pooling, so it does not compute one vector for a text; set the "
            f"field pooling: {', '.join(_POOLINGS)}",
        )
    if normalize_default is None:
        normalize_default = bundle.similarity not in _LENGTH_MATTERS
    return OutputSpec(
        OutputKind.MODEL if pooling is None else _POOLINGS[pooling],
        normalize_default if body.normalize is None else body.normalize,
        dimensions=positive("dimensions", body.dimensions),
    )
