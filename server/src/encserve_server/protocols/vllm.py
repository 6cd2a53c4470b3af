"""vLLM's routes /pooling, /score, /v1/score and /classify. Its route /rerank is among Jina's routes.

https://docs.vllm.ai/en/stable/models/pooling_models/
"""

import time
import uuid
from collections.abc import Iterator
from typing import Any, TypedDict

import msgspec
import orjson

from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Dialect, Reply, Request, Route
from encserve_server.errors import InvalidField, Naming, RequestField
from encserve_server.models.pairs import SentPair, SentQuery
from encserve_server.models.scoring import Scored
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.outputs import OutputSpec
from encserve_server.protocols import openai
from encserve_server.protocols.http_json import scores
from encserve_server.protocols.http_json.decoding import TEXTS, TEXTS_OR_IDS, BodyDecoder
from encserve_server.protocols.http_json.formats import FormatBody, as_base64, wants_normalized
from encserve_server.protocols.http_json.naming import http_naming
from encserve_server.protocols.http_json.replies import joined, row_as_json, rows_as_json, usage_of
from encserve_server.protocols.http_json.requests import (
    Inputs,
    SentInputs,
    choice,
    encode,
    is_left,
    pooled_output,
    positive,
)
from encserve_server.types.arrays import IndexedRows
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import OutputKind

_TOKEN_EMBED, _EMBED = "token_embed", "embed"
_TASKS = (_TOKEN_EMBED, _EMBED)


class PoolingBody(FormatBody):
    """The fields of /pooling.

    Attributes:
        input: A text, the ids of a text, or a list of these; required.
        task: token_embed for one vector per token, embed for one vector per input. Default: embed if the request sets
            pooling or the model was trained to compute one vector, otherwise token_embed.
        truncation_side: right or left. With left, an input that is too long is refused, because this server cuts only
            the end of a text.
        add_special_tokens: false allows lists of ids without the tokenizer's special tokens, and refuses texts. true
            refuses lists of ids without these tokens. Default: true.
        user: Ignored.
    """

    input: Inputs | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class ScoreBody(scores.ActivationBody):
    """The fields of /score.

    Attributes:
        text_1: The first text of each pair: a text or a list of texts.
        text_2: The second text of each pair: a text or a list of texts. If text_1 is one text, text_1 is in each pair.
            Otherwise both lists have the same length.
        queries: Another name of text_1.
        documents: Another name of text_2.
        max_tokens_per_doc: The maximum number of tokens of a second text. The end of a longer text is cut. 0 for as
            many as the model takes.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    max_tokens_per_doc: int | None = None


class ClassifyBody(scores.ActivationBody):
    """The fields of /classify.

    Attributes:
        input: A text or a list of texts; required.
    """

    input: str | list[str] | None = None


class Score(TypedDict):
    """The score of one pair.

    Attributes:
        index: The index of the pair, from 0.
    """

    index: int
    object: str
    score: float


class Scores(TypedDict):
    """The scores of all pairs.

    Attributes:
        data: The score of each pair, in the order of the pairs.
        model: The model's name in the request. If the request names no model, the model's own name.
    """

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: openai.Usage


class Classified(TypedDict):
    """The scores of one text.

    Attributes:
        index: The index of the text, from 0.
        label: The label with the largest score.
        probs: The score of each label, in the order of the model's labels.
        num_classes: The number of labels.
    """

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(TypedDict):
    """The scores of all texts.

    Attributes:
        data: The scores of each text, in the order of the texts.
        model: The model's name in the request. If the request names no model, the model's own name.
    """

    id: str
    object: str
    created: int
    model: str
    data: list[Classified]
    usage: openai.Usage


class PooledInput(TypedDict):
    """The vectors of one input.

    Attributes:
        index: The index of the input, from 0.
        data: One vector per token, or one vector. If the request asks for base64, base64 of little-endian float32.
        shape: With token_embed, the number of vectors and the number of dimensions; with embed, only the number of
            dimensions.
    """

    index: int
    object: str
    data: list[Any] | str
    shape: list[int]


class Pooled(TypedDict):
    """The vectors of all inputs.

    Attributes:
        data: One element for each input, in the order of the inputs.
        model: The model's name in the request. If the request names no model, the model's own name.
    """

    id: str
    object: str
    created: int
    model: str
    data: list[PooledInput]
    usage: openai.Usage


class VllmRoutes:
    """The handlers of the routes."""

    def __init__(self, host: Host) -> None:
        """Keep the settings."""
        self._settings = settings = host.settings
        self._pooling = BodyDecoder(PoolingBody, settings, input=TEXTS_OR_IDS)
        self._score = BodyDecoder(ScoreBody, settings, text_1=TEXTS, text_2=TEXTS, queries=TEXTS, documents=TEXTS)
        self._classify = BodyDecoder(ClassifyBody, settings, input=TEXTS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        pooled = {"input": ["a cat", "a dog"], "task": "token_embed"}
        compared = {"text_1": "a cat", "text_2": ["a kitten", "a car"]}
        texts = {"input": ["a good film", "a bad film"]}
        return [
            Route("POST", "/pooling", self.pooling, DIALECT, body=PoolingBody, reply=Pooled, example=pooled),
            Route("POST", "/score", self.score, DIALECT, body=ScoreBody, reply=Scores, example=compared),
            Route("POST", "/v1/score", self.score, DIALECT, body=ScoreBody, reply=Scores, example=compared),
            Route("POST", "/classify", self.classify, DIALECT, body=ClassifyBody, reply=Classifications, example=texts),
        ]

    async def pooling(self, request: Request, call: Call) -> Reply:
        """Return one vector for each token of each input, or one vector for each input, as vLLM does."""
        fields = await self._pooling.decode(request.body, call.hold)
        task = choice("task", fields.task, _TASKS)
        in_base64 = as_base64(fields)
        # Here `task` is vLLM's field. `input_type` says whether inputs are queries or documents.
        fields = msgspec.structs.replace(fields, task=None, normalize=wants_normalized(fields))
        sent = SentInputs("input", fields.input)
        return await encode(
            call,
            fields,
            sent,
            lambda bundle: _output(fields, bundle, task),
            lambda model, reply: joined(_answer(fields.model or model.bundle.name, reply, as_base64=in_base64)),
            self._settings,
            check=lambda model: openai.check_ids(model, sent, fields.add_special_tokens),
            from_left=is_left("truncation_side", fields.truncation_side),
        )

    async def score(self, request: Request, call: Call) -> Reply:
        """Return the score of each pair of texts, in the order of the pairs."""
        fields = await self._score.decode(request.body, call.hold)
        pairs, call.naming = _pairs_of(fields)
        raw = scores.wants_logits(fields)

        def answer(model: ServedModel, scored: Scored) -> Iterator[bytes]:
            yield _head("score", fields.model or model.bundle.name)
            for i, number in enumerate(scores.numbers(scored.scores[:, 0])):
                yield b'%s{"index":%d,"object":"score","score":%s}' % (b"," if i else b"", i, number)
            yield b"]," + orjson.dumps({"usage": scores.usage_of(scored)})[1:]

        return await scores.score(
            call,
            fields,
            pairs,
            answer,
            self._settings,
            check=scores.check_ranks,
            activation=lambda bundle: scores.logits_or_own(bundle, raw=raw),
            max_document_tokens=fields.max_tokens_per_doc,
        )

    async def classify(self, request: Request, call: Call) -> Reply:
        """Return the score of each label for each text."""
        fields = await self._classify.decode(request.body, call.hold)
        texts, raw = scores.listed("input", fields.input), scores.wants_logits(fields)

        def answer(model: ServedModel, scored: Scored) -> Iterator[bytes]:
            yield _head("classify", fields.model or model.bundle.name)
            count = len(scored.labels)
            for i, row in enumerate(scored.scores):
                label = orjson.dumps(scored.labels[int(row.argmax())])
                yield b'%s{"index":%d,"label":%s,"probs":' % (b"," if i else b"", i, label)
                yield row_as_json(row, as_base64=False) + b',"num_classes":%d}' % count
            yield b"]," + orjson.dumps({"usage": scores.usage_of(scored)})[1:]

        return await scores.score(
            call,
            fields,
            [],
            answer,
            self._settings,
            check=scores.check_labels,
            activation=lambda bundle: scores.logits_or_own(bundle, raw=raw),
            texts=texts,
        )


def _pairs_of(fields: ScoreBody) -> tuple[list[SentPair], Naming]:
    """Return the pairs of a request to /score, and the names of its fields in error messages.

    Raises:
        InvalidField: A list is missing, or the lists have different lengths.
        EmptyInputs: A list is empty.
    """
    names = ("text_1", "text_2") if fields.queries is None and fields.documents is None else ("queries", "documents")
    others = [name for name in ("text_1", "text_2") if name not in names and getattr(fields, name) is not None]
    if others:
        raise InvalidField(others[0], "must be left out if queries or documents are set")
    first, second = (scores.listed(name, getattr(fields, name)) for name in names)
    if len(first) not in (1, len(second)):
        problem = f"must hold as many texts as {names[0]}, which has {len(first)}; was {len(second)}"
        raise InvalidField(names[1], problem)
    queries: dict[str, SentQuery] = {}  # equal texts are tokenized once
    firsts = first if len(first) == len(second) else first * len(second)
    pairs = [SentPair(queries.setdefault(it, SentQuery(it)), other) for it, other in zip(firsts, second, strict=True)]
    is_list = len(first) > 1
    return pairs, http_naming(names[1], {RequestField.QUERY: names[0] + ("{at:[#]}" if is_list else "")})


def _head(kind: str, model: str) -> bytes:
    """Return the beginning of a reply, until its list `data`."""
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    return orjson.dumps(head)[:-1] + b',"data":['


DIALECT = Dialect(http_naming("input", {RequestField.TASK: "input_type"}), openai.DIALECT.refuse, openai.OpenAiError)


def _output(fields: PoolingBody, bundle: Bundle, task: str | None) -> OutputSpec:
    """Return the requested output of each input.

    Raises:
        InvalidField: A field has a wrong value, or the model was not trained to compute one vector.
    """
    if task == _EMBED or (task is None and (fields.pooling is not None or bundle.pooling is not None)):
        return pooled_output(fields, bundle)
    if fields.pooling is not None:
        raise InvalidField("pooling", f"must be left out with the task {_TOKEN_EMBED}, because it does not pool")
    if bundle.multi_vector is not None:  # keep the norms that the model was trained to produce
        kind, normalize = OutputKind.MULTI_VECTOR, False
    else:
        kind, normalize = OutputKind.TOKENS, True
    normalize = normalize if fields.normalize is None else fields.normalize
    return OutputSpec(kind, normalize, dimensions=positive("dimensions", fields.dimensions))


def _answer(name: str, reply: EncodeReply, *, as_base64: bool) -> Iterator[bytes]:
    yield _head("pool", name)
    is_one_row = reply.plan.row_bytes is not None
    for i, sequence in enumerate(reply.sequences):
        made = sequence.outputs[0]
        rows = made.rows if isinstance(made, IndexedRows) else made
        yield b'%s{"index":%d,"object":"pooling","data":' % (b"," if i else b"", i)
        if as_base64 or is_one_row:
            yield row_as_json(rows[0] if is_one_row else rows, as_base64=as_base64)
        else:
            yield from rows_as_json(rows)
        yield b',"shape":%s}' % orjson.dumps(rows.shape[is_one_row:])
    yield b"]," + orjson.dumps({"usage": usage_of(reply)})[1:]
