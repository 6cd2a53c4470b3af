"""Jina's protocol: /v1/rerank, and /rerank as vLLM and infinity serve it.

/v1/rerank is also Cohere's route, and /rerank is also the route of text-embeddings-inference.

https://api.jina.ai/docs
"""

import uuid
from collections.abc import Iterator
from typing import Any, TypedDict

import orjson

from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Dialect, Reply, Request, Route
from encserve_server.failures import Failure
from encserve_server.models.scoring import Scored
from encserve_server.models.served import ServedModel
from encserve_server.protocols import cohere, openai, tei
from encserve_server.protocols.http_json import scores
from encserve_server.protocols.http_json.decoding import DOCUMENTS, STRINGS, BodyDecoder
from encserve_server.protocols.http_json.naming import http_naming, text_of

_EXAMPLE = {"query": "a pet", "documents": ["a cat", "a car"], "top_n": 1}


class AnyRerankBody(scores.RerankBody):
    """The fields of /rerank. A request has documents, or texts as text-embeddings-inference's clients send them.

    By default, the scores of texts are from 0 to 1, and the scores of documents are the model's own.

    Attributes:
        texts: The texts to rank, instead of documents. The reply is then a list.
        return_text: Whether the reply has the texts. Only with texts.
    """

    texts: list[str] | None = None
    return_text: bool | None = None


class JinaRanked(TypedDict):
    """The best documents of a request.

    Attributes:
        id: A new id.
        model: The model's name in the request. If the request names no model, the model's own name.
        usage: The number of tokens that the model saw.
        results: The documents with the largest scores, the largest first.
    """

    id: str
    model: str
    usage: openai.Usage
    results: list[cohere.RankedDocument]


class JinaAndCohereRanked(JinaRanked):
    """The best documents of a request, for Jina's and for Cohere's clients.

    Attributes:
        meta: The version of Cohere's API, and the number of tokens that the model saw.
    """

    meta: dict[str, Any]


class RankedText(TypedDict, total=False):
    """A text with its score, for the clients of text-embeddings-inference.

    Attributes:
        index: The index of the text in the request.
        score: The score of the text.
        text: The text, if the request asks for texts.
    """

    index: int
    score: float
    text: str


class JinaError(cohere.CohereError):
    """An error for Jina's and for Cohere's clients.

    Attributes:
        detail: The same text as in message.
    """

    detail: str


class JinaRoutes:
    """The handlers of the routes."""

    def __init__(self, host: Host) -> None:
        """Keep the settings."""
        self._settings = settings = host.settings
        self._any = BodyDecoder(AnyRerankBody, settings, documents=DOCUMENTS, texts=STRINGS)
        self._documents = BodyDecoder(scores.RerankBody, settings, documents=DOCUMENTS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                "POST",
                "/rerank",
                self.rerank,
                tei.DIALECT,
                body=AnyRerankBody,
                reply=JinaRanked | list[RankedText],
                example=_EXAMPLE,
            ),
            Route(
                "POST",
                "/v1/rerank",
                self.rerank_v1,
                DIALECT,
                body=scores.RerankBody,
                reply=JinaAndCohereRanked,
                example=_EXAMPLE,
            ),
        ]

    async def rerank(self, request: Request, call: Call) -> Reply:
        """Return the documents with the largest scores for a query, as vLLM or text-embeddings-inference does."""
        fields = await self._any.decode(request.body, call.hold)
        if fields.documents is None:
            return await self._rank_texts(request, fields, call)
        scores.refuse_set(fields, ("texts", "return_text"), "documents")
        call.naming = cohere.OF_DOCUMENTS

        def answer(model: ServedModel, scored: Scored, results: Iterator[bytes]) -> Iterator[bytes]:
            yield from _answer(fields.model or model.bundle.name, scored, results)
            yield b"}"

        return await self._rank(request, fields, call, answer, scores.logits_or_own)

    async def rerank_v1(self, request: Request, call: Call) -> Reply:
        """Return the documents with the largest scores for a query, as Jina's API and version 1 of Cohere's API do."""
        fields = await self._documents.decode(request.body, call.hold)

        def answer(model: ServedModel, scored: Scored, results: Iterator[bytes]) -> Iterator[bytes]:
            yield from _answer(fields.model or model.bundle.name, scored, results)
            yield b"," + orjson.dumps({"meta": cohere.rerank_meta("1", scored)})[1:]

        return await self._rank(request, fields, call, answer, scores.logits_or_share)

    async def _rank(
        self, request: Request, fields: scores.RerankBody, call: Call, answer: Any, activation: Any
    ) -> Reply:
        return await scores.rank(
            call,
            fields,
            answer,
            self._settings,
            activation=activation,
            with_documents=fields.return_documents is not False,
            body_bytes=len(request.body),
        )

    async def _rank_texts(self, request: Request, fields: AnyRerankBody, call: Call) -> Reply:
        call.naming = _OF_TEXTS
        texts = fields.texts
        pairs = scores.ranked_pairs(fields.query, "texts", texts)
        scores.refuse_set(fields, ("return_documents", "rank_fields"), "texts")
        raw = scores.wants_logits(fields)
        return await scores.score(
            call,
            fields,
            pairs,
            lambda _, scored: scores.ranks_as_json(scored, "score", texts if fields.return_text else None, "text"),
            self._settings,
            check=scores.check_ranks,
            activation=lambda bundle: scores.logits_or_share(bundle, raw=raw),
            top_k=scores.top_k_of(fields.top_n, len(pairs)),
            max_document_tokens=fields.max_tokens_per_doc,
            more_bytes=2 * len(request.body) if fields.return_text else 0,
        )


def _answer(model: str, scored: Scored, results: Iterator[bytes]) -> Iterator[bytes]:
    """Write a reply without the brace at its end."""
    head = {"id": str(uuid.uuid4()), "model": model, "usage": scores.usage_of(scored)}
    yield orjson.dumps(head)[:-1] + b',"results":'
    yield from results


def _refuse(failure: Failure) -> dict[str, Any]:
    """Return an error for Jina's and for Cohere's clients."""
    return {"id": str(uuid.uuid4()), "message": text_of(failure), "detail": text_of(failure)}


_OF_TEXTS = http_naming("texts")
DIALECT = Dialect(cohere.OF_DOCUMENTS, _refuse, JinaError)
