"""The fields of requests for scores and ranks, the texts of documents, and the way to a reply."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from encserve_server import calls
from encserve_server.calls import Call
from encserve_server.endpoints.routes import Reply
from encserve_server.errors import EmptyInputs, FieldPath, InvalidField, RequestField, ResponseTooLarge, SequenceTooLong
from encserve_server.models.pairs import SentPair, SentQuery
from encserve_server.models.scoring import ScoreCall, Scored
from encserve_server.models.served import ServedModel
from encserve_server.protocols.http_json import kinds
from encserve_server.protocols.http_json.replies import joined
from encserve_server.protocols.http_json.requests import (
    TRUNCATED_HEADER,
    ModelBody,
    cut_of,
    first_digits,
    is_left,
    model_of,
    positive,
    priority_of,
    too_long_on_the_left,
)
from encserve_server.settings import Settings
from encserve_server.types.arrays import Numbers
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import Activation

# The longest score in a reply is like `{"index":2047,"relevance_score":-0.0000063184107,"document":{"text":}},`: 72
# characters, without the text.
_SCORE_BYTES = 96
# The fields of a reply besides the scores.
_REPLY_BYTES = 1024
_TEXT = "text"


class ScoreBody(ModelBody):
    """The fields of all routes with scores.

    Attributes:
        truncate: Whether a pair or a text that is too long is truncated, as the model was trained. Otherwise it is
            refused. Default: true, or false if the server runs with http_truncate off.
        truncate_prompt_tokens: Truncates pairs and texts to this number of tokens, special tokens included; -1 for as
            many tokens as the model takes.
        priority: interactive or bulk. Bulk requests are for jobs. While both wait, bulk gets one ninth of the work.
            Default: interactive. A number, as Cohere's and vLLM's clients send it, has no effect.
        truncation_side: right or left. With left, an input that is too long is refused, because this server cuts only
            the end of a text.
        truncation_direction: Another name of truncation_side.
    """

    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: str | int | None = None
    truncation_side: str | None = None
    truncation_direction: str | None = None


class ActivationBody(ScoreBody):
    """The fields of all routes with scores, and the choice between logits and scores.

    Attributes:
        use_activation: With false, the scores are the logits of the model.
        raw_scores: The opposite of use_activation, under the name of text-embeddings-inference and infinity. A request
            has only one of both fields.
        user: Ignored.
    """

    use_activation: bool | None = None
    raw_scores: bool | None = None
    user: str | None = None


class RerankBody(ActivationBody):
    """The fields of Jina's, vLLM's and Cohere's routes that rank documents.

    Attributes:
        query: The query; required.
        documents: The documents; required. A document is a string, or an object whose field text is ranked.
        top_n: The number of documents to return, the best first. Default: all.
        return_documents: Whether the reply has the documents.
        rank_fields: The fields of an object to rank, instead of text. Line breaks join the values. Refused if all
            documents are strings.
        max_tokens_per_doc: The maximum number of tokens of a document. The end of a longer document is cut. 0 for as
            many as the model takes.
        max_chunks_per_doc: Ignored, because a document is one chunk.
    """

    query: str | None = None
    documents: str | list[str | dict[str, Any]] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None


def ranked_pairs(query: str | None, field: str, documents: str | list[Any] | None) -> list[SentPair]:
    """Return a pair for each document.

    Raises:
        InvalidField: The query or the documents are missing.
        EmptyInputs: The list of documents is empty.
    """
    if query is None:
        raise InvalidField("query", "is required, and must be a string; was null")
    shared = SentQuery(query)
    return [SentPair(shared, document) for document in listed(field, documents)]


def texts_of(fields: RerankBody) -> list[str]:
    """Return the text of each document.

    Raises:
        InvalidField: The documents are missing, an object lacks its text, or rank_fields has no effect.
        EmptyInputs: The list is empty.
    """
    documents = listed("documents", fields.documents)
    names = [_TEXT] if fields.rank_fields is None else fields.rank_fields
    if not names:
        raise InvalidField("rank_fields", "must hold at least 1 name; was empty")
    if fields.rank_fields is not None and all(isinstance(it, str) for it in documents):
        raise InvalidField("rank_fields", "must be left out if all documents are strings")
    return [it if isinstance(it, str) else _text_of(f"documents[{i}]", it, names) for i, it in enumerate(documents)]


def listed(field: str, documents: str | list[Any] | None) -> list[Any]:
    """Return the texts of a field. One text becomes a list.

    Raises:
        InvalidField: The texts are missing.
        EmptyInputs: The list is empty.
    """
    if documents is None:
        raise InvalidField(field, "is required, and must be a list of texts; was null")
    if documents == []:
        raise EmptyInputs(field, "must hold at least 1 text; was empty")
    return [documents] if isinstance(documents, str) else documents


def _text_of(field: str, document: Mapping[str, Any], names: Sequence[str]) -> str:
    found = [(name, document[name]) for name in names if document.get(name) is not None]
    if not found:
        raise InvalidField(field, f"must have the field {' or '.join(names)[:64]}, because this server ranks texts")
    for name, value in found:
        if not isinstance(value, str):
            raise InvalidField(f"{field}.{name[:64]}", f"must be a string; was {type(value).__name__}")
    return "\n".join(value for _, value in found)


def check_ranks(bundle: Bundle) -> None:
    """Refuse a model that has several scores for each document.

    Raises:
        InvalidField: The model is a classifier with several labels.
    """
    if bundle.scores is not None and len(bundle.scores.labels) > 1:
        problem = (
            f"{bundle.name} has {len(bundle.scores.labels)} labels, so it cannot rank documents; it computes scores of "
            "labels: POST /classify or POST /predict"
        )
        raise InvalidField("model", problem)


def check_labels(bundle: Bundle) -> None:
    """Refuse a model without labels.

    Raises:
        InvalidField: The model is neither a cross-encoder nor a classifier.
    """
    if bundle.scores is None:
        raise kinds.lacks(bundle, kinds.SCORES)


def refuse_set(fields: ScoreBody, names: Sequence[str], other: str) -> None:
    """Refuse fields that have no meaning beside another field of the request, whose name is `other`.

    Raises:
        InvalidField: One of these fields is set.
    """
    for name in names:
        if getattr(fields, name) is not None:
            raise InvalidField(name, f"must be left out if {other} is set")


def wants_logits(fields: ActivationBody) -> bool:
    """Return whether a request wants the logits of the model as scores.

    Raises:
        InvalidField: The request has both fields for this choice.
    """
    if fields.use_activation is not None:
        refuse_set(fields, ("raw_scores",), "use_activation")
    return fields.raw_scores is True or fields.use_activation is False


def logits_or_own(bundle: Bundle, *, raw: bool) -> Activation | None:
    """Return the activation for logits if `raw`, otherwise for the model's own scores. Similarities have none."""
    return Activation.NONE if raw and bundle.scores is not None else None


def logits_or_share(bundle: Bundle, *, raw: bool) -> Activation | None:
    """Return the activation for logits if `raw`, otherwise for scores from 0 to 1. Similarities have none."""
    if bundle.scores is None:
        return None
    return Activation.NONE if raw else Activation.SIGMOID if len(bundle.scores.labels) == 1 else Activation.SOFTMAX


async def score(
    call: Call,
    fields: ScoreBody,
    pairs: Sequence[SentPair],
    build: Callable[[ServedModel, Scored], Iterator[bytes]],
    settings: Settings,
    *,
    check: Callable[[Bundle], None],
    activation: Callable[[Bundle], Activation | None],
    texts: Sequence[str] = (),
    top_k: int = 0,
    max_document_tokens: int | None = None,
    more_bytes: int = 0,
) -> Reply:
    """Compute the scores of pairs or texts, and return the reply.

    Args:
        call: The call.
        fields: The fields of the request.
        pairs: The pairs; empty with `texts`.
        build: Writes the body of the reply.
        settings: The settings of the server.
        check: Refuses models that the route does not serve.
        activation: Returns the activation of a model; None for the model's own.
        texts: The texts.
        top_k: See `ScoreCall`.
        max_document_tokens: See `ScoreCall`.
        more_bytes: The maximum number of bytes of texts and names in the reply.

    Raises:
        InvalidField: A field has a wrong value.
        ResponseTooLarge: The reply would be over the limit.
        SequenceTooLong: An input is too long, and the request does not allow truncation at the end.
        EncserveError: See `calls.score`.
    """
    count = len(pairs) or len(texts)
    model = call.resolve(count, *model_of(fields))
    bundle, truncated = model.bundle, 0
    model.check_counts(count)
    check(bundle)
    score_bytes = _REPLY_BYTES + count * _bytes_of_one(bundle)
    if score_bytes > model.limits.max_response_bytes:
        problem = (
            f"the reply would take {score_bytes} bytes, over the limit of {model.limits.max_response_bytes} "
            f"(max_response_bytes). Send fewer than {count} texts"
        )
        raise ResponseTooLarge(FieldPath(RequestField.INPUTS), problem)
    truncate, max_tokens = cut_of(fields.truncate, fields.truncate_prompt_tokens, bundle, settings)
    from_left = _wants_left(fields)
    if from_left and max_document_tokens:
        problem = "must be left out with truncation on the left, because this field cuts the end of documents"
        raise InvalidField("max_tokens_per_doc", f"{problem}; was {first_digits(max_document_tokens)}")
    request = ScoreCall(
        pairs,
        texts,
        top_k=top_k,
        activation=activation(bundle),
        truncate=truncate and not from_left,
        prompt_name=fields.prompt_name,
        priority=priority_of(fields.priority if isinstance(fields.priority, str) else None),
        max_document_tokens=positive("max_tokens_per_doc", max_document_tokens or None),
        max_tokens=max_tokens,
    )

    def counted(scored: Scored) -> bytes:
        nonlocal truncated
        truncated = sum(it.truncated for it in (*scored.queries, *scored.sequences))
        return joined(build(model, scored))

    try:
        answer = await calls.score(call, model, request, counted, score_bytes + more_bytes)
    except SequenceTooLong as error:
        raise too_long_on_the_left(error) if from_left else error from None
    return Reply(answer, {TRUNCATED_HEADER: f"{truncated}"} if truncated else {})


async def rank(
    call: Call,
    fields: RerankBody,
    build: Callable[[ServedModel, Scored, Iterator[bytes]], Iterator[bytes]],
    settings: Settings,
    *,
    activation: Callable[..., Activation | None],
    with_documents: bool,
    body_bytes: int,
) -> Reply:
    """Rank the documents of a request in Jina's, vLLM's and Cohere's form, and return the reply.

    Args:
        call: The call.
        fields: The fields of the request.
        build: Writes the body of the reply. The last argument is the list of results as JSON.
        settings: The settings of the server.
        activation: `logits_or_own` or `logits_or_share`.
        with_documents: Whether the results have the documents.
        body_bytes: The size of the request's body.

    Raises:
        InvalidField: A field has a wrong value.
        EncserveError: See `score`.
    """
    texts, raw = texts_of(fields), wants_logits(fields)
    documents = documents_in_reply(fields.documents) if with_documents else None

    def answer(model: ServedModel, scored: Scored) -> Iterator[bytes]:
        return build(model, scored, ranks_as_json(scored, "relevance_score", documents, "document"))

    return await score(
        call,
        fields,
        ranked_pairs(fields.query, "documents", texts),
        answer,
        settings,
        check=check_ranks,
        activation=lambda bundle: activation(bundle, raw=raw),
        top_k=top_k_of(fields.top_n, len(texts)),
        max_document_tokens=fields.max_tokens_per_doc,
        more_bytes=2 * body_bytes if with_documents else 0,
    )


def top_k_of(top_n: int | None, count: int) -> int:
    """Return the number of documents in a reply. Without `top_n`, and for 0, all `count` documents.

    Raises:
        InvalidField: The number is negative.
    """
    if top_n is not None and top_n < 0:
        raise InvalidField("top_n", f"must be at least 0; was {first_digits(top_n)}")
    return min(top_n or count, count)


def _wants_left(fields: ScoreBody) -> bool:
    """Return whether a request wants too long texts truncated at their beginning.

    Raises:
        InvalidField: A side is neither left nor right, or the request has both fields.
    """
    if None not in (fields.truncation_side, fields.truncation_direction):
        raise InvalidField("truncation_side", "must be left out if truncation_direction is set; both mean the same")
    return is_left("truncation_side", fields.truncation_side) or is_left(
        "truncation_direction", fields.truncation_direction
    )


def _bytes_of_one(bundle: Bundle) -> int:
    """Return the maximum number of bytes that the scores of one input take in a reply, without the texts."""
    if bundle.scores is None:
        return _SCORE_BYTES
    return sum(len(orjson.dumps(label)) + _SCORE_BYTES for label in bundle.scores.labels)


def numbers(scores: Numbers) -> list[bytes]:
    """Return each number of (n,) float32 as JSON, with the minimum number of digits."""
    plain = orjson.dumps(np.ascontiguousarray(scores, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    return plain[1:-1].split(b",")


def ranks_as_json(scored: Scored, name: str, documents: Sequence[Any] | None, field: str) -> Iterator[bytes]:
    """Write the ranks as a list of objects, the best first.

    Args:
        scored: The scores, the largest first.
        name: The name of the score.
        documents: The value of `field` for each document of the call; None for no such field.
        field: The name of the field with the document.
    """
    assert scored.indices is not None  # noqa: S101 - the call has `top_k`
    yield b"["
    for rank, (index, score) in enumerate(zip(scored.indices.tolist(), numbers(scored.scores[:, 0]), strict=True)):
        yield b'%s{"index":%d,"%s":%s' % (b"," if rank else b"", index, name.encode(), score)
        if documents is not None:
            yield b',"%s":%s' % (field.encode(), orjson.dumps(documents[index]))
        yield b"}"
    yield b"]"


def documents_in_reply(documents: str | list[Any] | None) -> list[Mapping[str, Any]]:
    """Return documents as objects. A string becomes an object with the field text."""
    return [{_TEXT: it} if isinstance(it, str) else it for it in listed("documents", documents)]


def usage_of(scored: Scored) -> dict[str, int]:
    """Return the number of tokens that the model saw, in OpenAI's form."""
    return {"prompt_tokens": scored.token_count, "total_tokens": scored.token_count}
