"""The protocol of Hugging Face's text-embeddings-inference. Requests without a model use the default model.

https://huggingface.github.io/text-embeddings-inference
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np
import orjson

from encserve import __version__
from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Check, Dialect, Reply, Request, Route
from encserve_server.errors import InvalidField, Naming, NotReady, RequestField
from encserve_server.failures import Failure
from encserve_server.models.offsets import utf8_offsets
from encserve_server.models.pairs import SentPair, SentQuery
from encserve_server.models.scoring import Scored
from encserve_server.models.served import EncodeReply, ServedModel, TokenizeCall, TokenizeReply
from encserve_server.outputs import OutputSpec
from encserve_server.protocols.http_json import kinds, scores
from encserve_server.protocols.http_json.decoding import STRINGS, TEXTS, TEXTS_OR_IDS, TEXTS_OR_PAIRS, BodyDecoder
from encserve_server.protocols.http_json.naming import http_naming, text_of
from encserve_server.protocols.http_json.replies import (
    JSON_GROWTH,
    SPARSE_GROWTH,
    joined,
    pooled_rows,
    rows_as_json,
    sparse_as_json,
)
from encserve_server.protocols.http_json.requests import (
    Body,
    EncodeBody,
    Inputs,
    PooledBody,
    SentInputs,
    choice,
    encode,
    is_left,
    model_of,
    pooled_output,
    positive,
    task_of,
)
from encserve_server.statuses import Status
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import Activation, OutputKind
from encserve_server.types.sequences import TokenSequence

_TOKENS = OutputSpec(OutputKind.TOKENS)
_INPUTS = "inputs"
_EXAMPLE = {"inputs": ["a cat", "a dog"]}
_ACTIVATIONS = {"sigmoid": Activation.SIGMOID, "softmax": Activation.SOFTMAX, "none": Activation.NONE}


class EmbedBody(PooledBody):
    """The fields of /embed.

    Attributes:
        inputs: A text, the ids of a text, or a list of these; required.
        truncation_direction: Right or left. With left, an input that is too long is refused, because this server cuts
            only the end of a text.
    """

    inputs: Inputs | None = None
    truncation_direction: str | None = None


class EmbedAllBody(EncodeBody):
    """The fields of /embed_all.

    Attributes:
        inputs: A text, the ids of a text, or a list of these; required.
        truncation_direction: Right or left. With left, an input that is too long is refused, because this server cuts
            only the end of a text.
    """

    inputs: Inputs | None = None
    truncation_direction: str | None = None


class EmbedSparseBody(EmbedAllBody):
    """The fields of /embed_sparse: the fields of /embed_all, and one more.

    Attributes:
        max_active_dims: The number of weights to return, the largest first. Default: as the model was trained.
    """

    max_active_dims: int | None = None


class SimilarityInputs(msgspec.Struct):
    """The inputs of /similarity."""

    source_sentence: str | None = None
    sentences: list[str] | None = None


AnyPooled = TypeVar("AnyPooled", bound=PooledBody)


class SimilarityParameters(msgspec.Struct):
    """Further fields. A field that is set here replaces the field of the same name at the top level of the request.

    Attributes:
        truncate: Whether texts that are too long are cut. Otherwise they are refused.
        truncation_direction: Right or left. With left, an input that is too long is refused, because this server cuts
            only the end of a text.
        prompt_name: The name of the model's prompt that is put before every text.
    """

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class SimilarityBody(PooledBody):
    """The fields of /similarity.

    Attributes:
        inputs: One sentence, and the sentences to compare with it; required.
        parameters: Further fields.
    """

    inputs: SimilarityInputs | None = None
    parameters: SimilarityParameters | None = None


class RootBody(EmbedBody):
    """The fields of /. The route works like /similarity if inputs are sentences to compare, otherwise like /embed.

    Attributes:
        inputs: A text, the ids of a text, a list of these, or sentences to compare; required.
        parameters: Further fields.
    """

    inputs: Inputs | SimilarityInputs | None = None  # type: ignore[assignment]
    parameters: SimilarityParameters | None = None


class TokenizeBody(Body):
    """The fields of /tokenize.

    Attributes:
        inputs: A text, or a list of texts; required.
        add_special_tokens: With false, special tokens are left out.
    """

    inputs: str | list[str] | None = None
    add_special_tokens: bool | None = None


class PredictParameters(msgspec.Struct):
    """The fields that huggingface_hub sends in addition.

    Attributes:
        function_to_apply: The function that turns the logits of the model into scores: sigmoid, softmax, or none for
            logits. raw_scores and use_activation must then be left out.
        top_k: The number of labels to return for each input. Default: all.
    """

    function_to_apply: str | None = None
    top_k: int | None = None


class PredictBody(scores.ActivationBody):
    """The fields of /predict. By default, scores are from 0 to 1: sigmoid for one label, softmax for several labels.

    Attributes:
        inputs: A text, a pair of texts, or a list of lists with 1 or 2 texts each; required.
        parameters: Further fields. With this object, the reply is always a list of lists, even if inputs is a single
            text or a single pair. huggingface_hub sends requests and reads replies in this form.
    """

    inputs: str | list[str | list[str]] | None = None
    parameters: PredictParameters | None = None


class Prediction(TypedDict):
    """The score of one label."""

    score: float
    label: str


class SparseWeight(TypedDict):
    """One weight of an input.

    Attributes:
        index: The index of the weight in the vocabulary.
        value: The weight.
    """

    index: int
    value: float


class Token(TypedDict):
    """A token of a text.

    Attributes:
        id: The token id.
        text: The part of the text that the token stands for. Special tokens have no such part; then this is the token's
            string in the vocabulary.
        special: Whether the token is a special token.
        start: The start in the text, in bytes of UTF-8; null for a special token.
        stop: The end in the text, in bytes of UTF-8; null for a special token.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TeiError(TypedDict):
    """An error in the form of text-embeddings-inference.

    Attributes:
        error: The field, the problem, the sent value and the allowed values.
        error_type: Validation, Empty, Tokenizer, Backend, Overloaded or Unhealthy.
    """

    error: str
    error_type: str


class TeiRoutes:
    """The handlers of the routes."""

    def __init__(self, host: Host) -> None:
        """Keep the settings."""
        self._is_serving = host.is_serving
        self._catalog = host.calls.catalog
        self._settings = settings = host.settings
        self._root = BodyDecoder(RootBody, settings, inputs=TEXTS_OR_IDS, sentences=STRINGS)
        self._embed = BodyDecoder(EmbedBody, settings, inputs=TEXTS_OR_IDS)
        self._embed_all = BodyDecoder(EmbedAllBody, settings, inputs=TEXTS_OR_IDS)
        self._embed_sparse = BodyDecoder(EmbedSparseBody, settings, inputs=TEXTS_OR_IDS)
        self._similarity = BodyDecoder(SimilarityBody, settings, sentences=STRINGS)
        self._predict = BodyDecoder(PredictBody, settings, inputs=TEXTS_OR_PAIRS)
        self._tokenize = BodyDecoder(TokenizeBody, settings, inputs=TEXTS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("POST", "/", self.root, DIALECT, body=RootBody, reply=list[list[float] | float], example=_EXAMPLE),
            Route("POST", "/embed", self.embed, DIALECT, body=EmbedBody, reply=list[list[float]], example=_EXAMPLE),
            Route(
                "POST",
                "/embed_all",
                self.embed_all,
                DIALECT,
                body=EmbedAllBody,
                reply=list[list[list[float]]],
                example=_EXAMPLE,
            ),
            Route(
                "POST",
                "/embed_sparse",
                self.embed_sparse,
                DIALECT,
                body=EmbedSparseBody,
                reply=list[list[SparseWeight]],
                example=_EXAMPLE,
            ),
            Route(
                "POST",
                "/similarity",
                self.similarity,
                DIALECT,
                body=SimilarityBody,
                reply=list[float],
                example={"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}},
            ),
            Route(
                "POST",
                "/predict",
                self.predict,
                DIALECT,
                body=PredictBody,
                reply=list[Prediction | list[Prediction]],
                example={"inputs": [["a good film"], ["a bad film"]]},
            ),
            Route(
                "POST",
                "/tokenize",
                self.tokenize,
                DIALECT,
                body=TokenizeBody,
                reply=list[list[Token]],
                example=_EXAMPLE,
            ),
            Route("GET", "/info", self.info, DIALECT, is_listing=True, reply=dict[str, Any]),
            Route("GET", "/health", self.health, DIALECT, check=Check.READY),
            Route("GET", "/ping", self.health, DIALECT, check=Check.READY),
            Route("GET", "/", self.health, DIALECT, check=Check.READY),
        ]

    async def root(self, request: Request, call: Call) -> Reply:
        """Return one vector for each input, or the similarities of sentences, as huggingface_hub's client expects."""
        fields = await self._root.decode(request.body, call.hold)
        if isinstance(fields.inputs, SimilarityInputs):
            return await self._compare(call, fields, fields.inputs, fields.parameters, fields.truncation_direction)
        fields, direction = _with_parameters(fields, fields.parameters)
        return await self._embed_inputs(
            call, msgspec.structs.replace(fields, truncation_direction=direction or fields.truncation_direction)
        )

    async def embed(self, request: Request, call: Call) -> Reply:
        """Return one vector for each input, as text-embeddings-inference does."""
        return await self._embed_inputs(call, await self._embed.decode(request.body, call.hold))

    async def embed_all(self, request: Request, call: Call) -> Reply:
        """Return one vector for each token of each input."""
        return await self._encode(
            call,
            await self._embed_all.decode(request.body, call.hold),
            lambda _: _TOKENS,
            lambda reply: joined(_lists(reply, rows_as_json)),
        )

    async def embed_sparse(self, request: Request, call: Call) -> Reply:
        """Return the nonzero weights of each input, with their indices in the vocabulary."""
        fields = await self._embed_sparse.decode(request.body, call.hold)
        kept = positive("max_active_dims", fields.max_active_dims)

        def output(bundle: Bundle) -> OutputSpec:
            if bundle.sparse is None:
                raise kinds.lacks(bundle, kinds.SPARSE)
            return OutputSpec(OutputKind.SPARSE, max_active_dims=kept)

        return await self._encode(
            call, fields, output, lambda reply: joined(_lists(reply, sparse_as_json)), SPARSE_GROWTH
        )

    async def similarity(self, request: Request, call: Call) -> Reply:
        """Return the similarity of one sentence to each of several other sentences."""
        fields = await self._similarity.decode(request.body, call.hold)
        return await self._compare(call, fields, fields.inputs or SimilarityInputs(), fields.parameters)

    async def _embed_inputs(self, call: Call, fields: EmbedBody) -> Reply:
        return await self._encode(
            call,
            fields,
            lambda bundle: pooled_output(fields, bundle, normalize_default=True),
            lambda reply: joined(rows_as_json(pooled_rows(reply))),
        )

    async def _compare(
        self,
        call: Call,
        fields: PooledBody,
        inputs: SimilarityInputs,
        parameters: SimilarityParameters | None,
        direction: str | None = None,
    ) -> Reply:
        """Return the cosine similarity of the first sentence to each other sentence."""
        if inputs.source_sentence is None:
            raise InvalidField("inputs.source_sentence", "must be a string; was null")
        sentences = SentInputs("inputs.sentences", inputs.sentences or []).items
        fields, its_direction = _with_parameters(fields, parameters)
        from_left = is_left("parameters.truncation_direction", its_direction or direction)
        call.naming = _OF_SENTENCES
        return await encode(
            call,
            fields,
            SentInputs(_INPUTS, [inputs.source_sentence, *sentences]),
            lambda bundle: pooled_output(fields, bundle, normalize_default=False),
            lambda _, reply: _cosines(reply),
            self._settings,
            growth=1.0,
            from_left=from_left,
        )

    async def _encode(
        self,
        call: Call,
        fields: EmbedBody | EmbedAllBody,
        output: Callable[[Bundle], OutputSpec],
        build: Callable[[EncodeReply], bytes],
        growth: float = JSON_GROWTH,
    ) -> Reply:
        return await encode(
            call,
            fields,
            SentInputs(_INPUTS, fields.inputs),
            output,
            lambda _, reply: build(reply),
            self._settings,
            growth=growth,
            from_left=is_left("truncation_direction", fields.truncation_direction),
        )

    async def predict(self, request: Request, call: Call) -> Reply:
        """Return the scores of all labels for each text or pair of texts, the largest score first."""
        fields = await self._predict.decode(request.body, call.hold)
        texts, pairs, is_one = _predicted(fields.inputs)
        call.naming = _OF_PAIRS if pairs else _NAMING
        parameters = fields.parameters or PredictParameters()
        is_flat = is_one and fields.parameters is None
        function = choice("parameters.function_to_apply", parameters.function_to_apply, _ACTIVATIONS)
        if function is not None:
            scores.refuse_set(fields, ("raw_scores", "use_activation"), "parameters.function_to_apply")
        raw = scores.wants_logits(fields)
        count = positive("parameters.top_k", parameters.top_k) or None

        def answer(_: ServedModel, scored: Scored) -> Iterator[bytes]:
            labels = [orjson.dumps(label) for label in scored.labels]
            yield b"" if is_flat else b"["
            for i, row in enumerate(scored.scores):
                found = zip(scores.numbers(row), labels, strict=True)
                made = [b'{"score":%s,"label":%s}' % it for it in found]
                yield b"," if i else b""
                yield b"[" + b",".join([made[at] for at in np.argsort(-row, kind="stable")[:count].tolist()]) + b"]"
            yield b"" if is_flat else b"]"

        def activation(bundle: Bundle) -> Activation | None:
            if function is not None:
                return _ACTIVATIONS[function]
            return scores.logits_or_share(bundle, raw=raw)

        return await scores.score(
            call,
            fields,
            pairs,
            answer,
            self._settings,
            check=scores.check_labels,
            activation=activation,
            texts=texts,
        )

    async def tokenize(self, request: Request, call: Call) -> Reply:
        """Return the tokens of each text, without computing vectors."""
        fields = await self._tokenize.decode(request.body, call.hold)
        texts = SentInputs(_INPUTS, fields.inputs).items
        model = call.resolve(len(texts), *model_of(fields))
        asked = TokenizeCall(
            texts,
            include_token_strings=True,
            prompt_name=fields.prompt_name,
            task=task_of(fields, model.bundle),
        )
        keeps_special = fields.add_special_tokens is not False

        def build(reply: TokenizeReply) -> bytes:
            tokenized = zip(reply.sequences, texts, strict=True)
            lists = [orjson.dumps(list(_tokens(model, it, text, keeps_special))) for it, text in tokenized]
            return b"[" + b",".join(lists) + b"]"

        return Reply(await call.tokenize(model, asked, build, JSON_GROWTH))

    async def info(self, request: Request, call: Call) -> Reply:
        """Describe the default model and the limits of the server."""
        del request
        model = call.resolve(0, "", "")
        bundle = model.bundle
        return Reply(
            orjson.dumps(
                {
                    "model_id": bundle.repository or bundle.name,
                    "model_sha": bundle.fingerprint,
                    "model_dtype": model.engine_info.precision,
                    "served_model_name": bundle.name,
                    "model_type": _model_type(bundle),
                    "max_concurrent_requests": self._settings.max_connections,  # one request at a time per connection
                    "max_input_length": bundle.max_sequence_tokens,
                    "max_batch_tokens": model.max_batch_tokens,
                    "max_batch_requests": None,
                    "max_client_batch_size": self._settings.max_request_sequences,
                    "auto_truncate": self._settings.http_truncate,
                    "tokenization_workers": self._settings.tokenizer_threads,
                    "version": __version__,
                    "sha": None,
                    "docker_label": None,
                }
            )
        )

    async def health(self, request: Request, call: Call) -> Reply:
        """Answer 200 with an empty body while every model is ready, otherwise 503 with the reason.

        Raises:
            NotReady: A model is not ready.
        """
        del request, call
        if not self._is_serving():
            self._catalog.check_loaded()
            raise NotReady
        return Reply(b"")


def _with_parameters(fields: AnyPooled, parameters: SimilarityParameters | None) -> tuple[AnyPooled, str | None]:
    """Return the fields with the values of `parameters`, and the truncation direction of `parameters`."""
    if parameters is None:
        return fields, None
    changed = msgspec.structs.replace(
        fields,
        truncate=fields.truncate if parameters.truncate is None else parameters.truncate,
        prompt_name=fields.prompt_name if parameters.prompt_name is None else parameters.prompt_name,
    )
    return changed, parameters.truncation_direction


def _refuse(failure: Failure) -> dict[str, Any]:
    """Return an error in the form of text-embeddings-inference."""
    return {"error": text_of(failure), "error_type": failure.status.tei_type}


def _status_of(status: Status) -> int:
    return status.tei


def _sentence(at: int | None) -> str:
    """Return the name of an input of /similarity. The first input is the source sentence."""
    return f"inputs.sentences[{at - 1}]" if at else "inputs.source_sentence"


_ACTIVATION = {RequestField.ACTIVATION: "parameters.function_to_apply"}
_NAMING = http_naming(_INPUTS, _ACTIVATION)
_OF_PAIRS = http_naming(_INPUTS, _ACTIVATION | {RequestField.QUERY: _INPUTS + "{at:[#]}"})
_OF_SENTENCES = Naming({**_NAMING.fields, RequestField.INPUT: _sentence, RequestField.TEXT: _sentence})
DIALECT = Dialect(_NAMING, _refuse, TeiError, _status_of)


def _tokens(model: ServedModel, sequence: TokenSequence, text: str, keeps_special: bool) -> Iterator[dict[str, Any]]:
    """Yield the tokens of a text. Starts and ends are offsets in bytes of UTF-8."""
    tokenizer, special_tokens = model.tokenizer, sequence.special
    starts, ends = sequence.char_starts, sequence.char_ends
    if tokenizer is None or special_tokens is None or starts is None or ends is None:  # never for a text
        return
    offsets = utf8_offsets(text).tolist()
    for token_id, start, end, special in zip(
        sequence.input.tolist(), starts, ends, special_tokens.tolist(), strict=True
    ):
        if special and not keeps_special:
            continue
        yield {
            "id": token_id,
            "text": tokenizer.token_string(token_id) if special or start == end else text[start:end],
            "special": special,
            "start": None if special else offsets[start],
            "stop": None if special else offsets[end],
        }


def _predicted(inputs: str | list[Any] | None) -> tuple[list[str], list[SentPair], bool]:
    """Return the texts or the pairs of /predict, and whether inputs is a single text or a single pair.

    Raises:
        InvalidField: An input is neither a text nor a pair, or the request has both texts and pairs.
        EmptyInputs: The list is empty.
    """
    items = scores.listed(_INPUTS, inputs)
    is_one = isinstance(items[0], str)
    if is_one and any(not isinstance(it, str) for it in items):
        raise InvalidField(_INPUTS, "must have only lists of 1 or 2 strings, if one input is such a list")
    members: list[Any] = [items] if is_one else items
    for i, member in enumerate(members):
        name = _INPUTS if is_one else f"{_INPUTS}[{i}]"
        if isinstance(member, str):
            raise InvalidField(name, "must be a list of 1 or 2 strings, as the first input; was a string")
        if len(member) not in (1, 2):
            raise InvalidField(name, f"must be a list of 1 or 2 strings; was {len(member)} strings")
        if len(member) != len(members[0]):
            raise InvalidField(name, "must be a pair as the first input, or no input a pair: send two requests")
    if len(members[0]) == 1:
        return [text for (text,) in members], [], is_one
    return [], [SentPair(SentQuery(first), second) for first, second in members], is_one


def _model_type(bundle: Bundle) -> dict[str, Any]:
    """Return text-embeddings-inference's description of a model: its labels or its pooling."""
    if bundle.scores is None:
        return {"embedding": {"pooling": _pooling_of(bundle)}}
    labels = dict(enumerate(bundle.scores.labels))
    names = {
        "id2label": {f"{i}": label for i, label in labels.items()},
        "label2id": {label: i for i, label in labels.items()},
    }
    return {"reranker" if len(labels) == 1 else "classifier": names}


def _pooling_of(bundle: Bundle) -> str:
    """Return text-embeddings-inference's name for a model's pooling, or our own name if it has no name there."""
    if (pooling := bundle.pooling) is not None:
        return pooling.kinds[0].name.lower() if pooling.is_plain else "model"
    return "splade" if bundle.sparse is not None else "none"


def _cosines(reply: EncodeReply) -> bytes:
    """Return the cosine similarities of the first vector to the others. A vector of zeros has similarity 0."""
    vectors = (sequence.outputs[0][0].astype(np.float64) for sequence in reply.sequences)  # one at a time: (width,)
    first = next(vectors)
    its_square = first @ first
    cosines = []
    for vector in vectors:
        product = math.sqrt(its_square * (vector @ vector))
        cosines.append(min(max(first @ vector / product, -1.0), 1.0) if product else 0.0)
    return orjson.dumps(np.array(cosines, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)


def _lists(reply: EncodeReply, as_json: Callable[[Any], Iterator[bytes]]) -> Iterator[bytes]:
    """Write a list with one element for each input."""
    yield b"["
    for i, sequence in enumerate(reply.sequences):
        if i:
            yield b","
        yield from as_json(sequence.outputs[0])
    yield b"]"
