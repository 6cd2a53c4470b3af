"""The methods of a client, over a `Wire`. Both clients share this code."""

import random as random_module
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from encserve_client._arguments import as_float, as_int, check_function, check_type
from encserve_client._logic.answers import (
    ExpectedIds,
    check_fingerprint,
    decode_response,
    empty_result,
    merge_answers,
    model_info,
    sequence_infos,
)
from encserve_client._logic.capabilities import capability_error, input_errors
from encserve_client._logic.dispatch import Dispatch, MessageSource, PlannedMessages, TimeLimit
from encserve_client._logic.failures import Outages, ServerHistory
from encserve_client._logic.inspecting import InspectAssembler, layer_error
from encserve_client._logic.planning import (
    Limits,
    Message,
    MessageBuilder,
    as_bulk,
    plan_messages,
    reply_bytes_per_token,
)
from encserve_client._logic.scores import (
    Field,
    ScoreAnswer,
    ScoreOptions,
    as_vectors,
    check_documents,
    check_pairs,
    check_widths,
    decode_scores,
    plan_scores,
    plan_vectors,
    score_limits,
)
from encserve_client._logic.streams import Result, Stream, StreamMessages, StreamOptions
from encserve_client._logic.wire import Rpc, Wire
from encserve_client.exceptions import EncserveError, InvalidInputError, InvalidRequestError, ProtocolError
from encserve_client.inputs import (
    Input,
    SpanInput,
    check_input,
    check_inputs,
    check_iterable,
    check_spans,
    check_texts,
    read_inputs,
)
from encserve_client.options import (
    PRIORITIES,
    UNITS,
    Array,
    Options,
    Priority,
    Progress,
    SpanUnit,
    check_choice,
)
from encserve_client.results import Classification, EncodeResult, InspectResult, ModelInfo, SequenceInfo, SparseVector
from encserve_client.retry import OnOutage, RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")
ModelKey = tuple[str, str]

# A call sends all messages again if the model was replaced meanwhile: at most this many rounds in total.
_MAX_ROUNDS = 3
# A call ends after this many failed messages in a row. Otherwise a dead server would delay each message in turn.
_MOST_FAILED_IN_A_ROW = 8
# The longest time between two calls of `progress`.
_PROGRESS_SECONDS = 1.0
# The defaults of `max_in_flight`, for few and for many rows per input.
_VECTORS_IN_FLIGHT = 2048
_ROWS_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's settings; see `EncoderClient`."""

    timeout_seconds: float
    max_message_bytes: int
    max_concurrent_messages: int
    retry: RetryPolicy
    random: Callable[[], float] = random_module.random
    target: str = ""
    expected: ExpectedIds = field(default_factory=ExpectedIds)
    priority: Priority | None = None
    on_outage: OnOutage | None = None

    def __post_init__(self) -> None:
        """Check the settings. Raise InvalidInputError if a value is not allowed."""
        if not self.timeout_seconds > 0:
            raise InvalidInputError(f"must be > 0; was {self.timeout_seconds}", field="timeout_seconds")
        if self.max_message_bytes < 1:
            raise InvalidInputError(f"must be >= 1; was {self.max_message_bytes}", field="max_message_bytes")
        if self.max_concurrent_messages < 1:
            raise InvalidInputError(
                f"must be >= 1; was {self.max_concurrent_messages}",
                field="max_concurrent_messages",
            )
        if self.priority is not None:
            check_choice("priority", self.priority, Priority)


class Core:
    """The logic of a client. Threads and tasks share the `Core` of a client.

    Only `_models` and `history` change. A change of one entry of `_models` is atomic.

    Attributes:
        settings: The client's settings.
        history: Whether the server has ever answered.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history = ServerHistory()
        self._models: dict[ModelKey, ModelInfo] = {}

    async def run(
        self,
        wire: Wire,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> EncodeResult:
        """Return all outputs, with the tokens or the error of each input."""
        items, _ = read_inputs(inputs)
        check_function("progress", progress)
        return await self.encode(wire, items, key, options, timeout_seconds, describe=True, progress=progress)

    async def embed(
        self,
        wire: Wire,
        inputs: Iterable[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        """Return the first output of each input: a matrix if pooled, otherwise a list. One input returns its item."""
        items, is_one = read_inputs(inputs)
        check_inputs(items)
        check_function("progress", progress)
        kind = options.outputs[0].kind
        if not items and kind in ("tokens", "multi_vector", "sparse"):
            return []
        result = await self.encode(wire, items, key, options, timeout_seconds, progress=progress)
        output = result.outputs[0]
        if kind == "sparse":
            found: Any = output.sparse_vectors()
        elif kind in ("tokens", "multi_vector"):
            found = output.arrays()
        else:
            found = output.matrix()
        return found[0] if is_one else found

    async def embed_spans(
        self,
        wire: Wire,
        item: Input,
        spans: Iterable[tuple[int, int]],
        unit: SpanUnit | None,
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
    ) -> Array:
        """Return one row for each range of one input."""
        spanned = SpanInput(check_input(item, "text"), check_spans(spans), unit)
        result = await self.encode(wire, [spanned], key, options, timeout_seconds)
        return result.outputs[0].matrix()

    async def encode(
        self,
        wire: Wire,
        inputs: Sequence[Input | SpanInput],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        *,
        describe: bool = False,
        progress: Progress | None = None,
    ) -> EncodeResult:
        """Split the inputs into messages, send the messages, and merge the answers.

        With `describe`, the result has the tokens or the error of each input. Without, the first error is raised.
        """

        def decode(message: Message, response: pb.EncodeResponse) -> EncodeResult:
            return decode_response(response, options, len(message.indices), describe=describe)

        started = wire.now()
        time_limit = self.time_limit(timeout_seconds, started)
        expected = self.settings.expected
        async with aclosing(wire):
            # Without inputs, the result needs the model's description. A remembered description may be out of date.
            known = self._models.get(key)
            use_remembered = bool(inputs) and known is not None and not input_errors(known, inputs)
            info = await self._model_for(wire, key, options, time_limit, use_remembered=use_remembered)
            refused = {} if info is known else input_errors(info, inputs)
            if refused and not describe:
                raise next(iter(refused.values()))
            if not inputs:
                expected.check(info)
                return empty_result(info, options, {}, wire.now() - started, 0)
            limits = self._limits(info, options)
            template = self._request_template(key, options)
            attempts = 0
            for _ in range(_MAX_ROUNDS):
                rejected = dict(refused) if describe else None
                messages = plan_messages(inputs, template, limits, rejected)
                if self.settings.priority is None:
                    messages = as_bulk(messages, template)
                dispatch: Dispatch[EncodeResult] = self._dispatch(PlannedMessages(messages), time_limit, rejected)
                try:
                    await exchange(wire, "Encode", dispatch, decode, progress, len(inputs))
                finally:
                    self._forget_limits(key, dispatch)
                attempts += dispatch.attempts
                answers = sorted(dispatch.answers, key=lambda answer: answer[0][0])
                if len({answer.fingerprint for _, answer in answers}) <= 1:
                    break
            if not answers and dispatch.failure is not None:
                raise dispatch.failure
            is_sparse = any(output.kind == "sparse" for output in options.outputs)
            if is_sparse and answers and answers[0][1].fingerprint != info.fingerprint:
                info = await self._fetch_model(wire, key, time_limit)  # the remembered width may be out of date
        errors = dict(sorted((rejected or {}).items()))
        if answers:
            result = merge_answers(answers, errors, wire.now() - started, attempts, info.sparse_width)
        else:
            result = empty_result(info, options, errors, wire.now() - started, attempts)
        expected.check(result)
        return result

    def stream(
        self,
        open_wire: Callable[[object], Wire],
        inputs: Iterable[Any] | AsyncIterable[Any],
        key: ModelKey,
        options: Options,
        *,
        ordered: bool,
        max_in_flight: int | None,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> AsyncGenerator[Iterator[tuple[int, Result]], None]:
        """Check the arguments before any input is read. Return the results; see `Stream.runs`.

        A result is (width,) for a pooled output, a `SparseVector` for "sparse", and (rows, width) otherwise.
        `open_wire` gets the inputs, because the wire reads an async iterable.

        Raises:
            InvalidInputError: An argument is wrong.
        """
        check_iterable(inputs)
        check_function("progress", progress)
        if max_in_flight is None:
            few_rows = options.outputs[0].is_pooled or options.outputs[0].kind == "sparse"
            max_in_flight = _VECTORS_IN_FLIGHT if few_rows else _ROWS_IN_FLIGHT
        if as_int("max_in_flight", max_in_flight) < 1:
            raise InvalidInputError(f"must be >= 1; was {max_in_flight}", field="max_in_flight")
        time_limit = TimeLimit(self.time_limit(timeout_seconds, 0.0).seconds)
        items = [inputs] if isinstance(inputs, str) else inputs
        total = len(items) if isinstance(items, Sized) else None
        iterator = None if isinstance(items, AsyncIterable) else iter(items)
        stream = StreamOptions(iterator, total, ordered, max_in_flight, progress)
        return self._stream(open_wire(items), key, options, time_limit, stream)

    async def _stream(
        self, wire: Wire, key: ModelKey, options: Options, time_limit: TimeLimit, stream: StreamOptions
    ) -> AsyncGenerator[Iterator[tuple[int, Result]], None]:
        fingerprint = self.settings.expected.fingerprint

        def decode(message: Message, response: pb.EncodeResponse) -> Sequence[Array | SparseVector]:
            nonlocal fingerprint
            answer = decode_response(response, options, len(message.indices), describe=False)
            self.settings.expected.check(answer)
            fingerprint = fingerprint or answer.fingerprint
            check_fingerprint(fingerprint, answer.fingerprint)
            block = answer.outputs[0].blocks[0]
            if options.outputs[0].kind == "sparse":
                return block.sparse_vectors(info.sparse_width)
            return list(block.rows.copy()) if options.outputs[0].is_pooled else block.split()

        concurrent = self.settings.max_concurrent_messages
        async with aclosing(wire):
            # The width of a sparse vector comes from the model, so the description must be current.
            use_remembered = options.outputs[0].kind != "sparse"
            info = await self._model_for(wire, key, options, time_limit, use_remembered=use_remembered)
            limits = self._limits(info, options)
            share = max(stream.max_in_flight // concurrent, 1)  # so that several messages can be in flight
            limits = replace(limits, max_sequences=min(limits.max_sequences, share))
            source = StreamMessages(MessageBuilder(self._request_template(key, options), limits))
            dispatch: Dispatch[Sequence[Array | SparseVector]] = self._dispatch(source, time_limit, rejected={})
            try:
                async with aclosing(Stream(wire, source, dispatch, decode, stream).runs()) as runs:
                    async for results in runs:
                        yield results
            finally:
                self._forget_limits(key, dispatch)

    async def inspect(
        self, wire: Wire, request: pb.InspectRequest, key: ModelKey, options: Options, timeout_seconds: float | None
    ) -> InspectResult:
        """Send one Inspect request and return the result."""
        started = wire.now()
        time_limit = self.time_limit(timeout_seconds, started)
        expected = self.settings.expected
        request.expected_fingerprint, request.expected_space_id = expected.fingerprint, expected.space_id
        dispatch: Dispatch[InspectAssembler] = self._dispatch(PlannedMessages([Message(request)]), time_limit)
        async with aclosing(wire):
            await self._model_for(wire, key, options, time_limit, request=request)
            await exchange(wire, "Inspect", dispatch, lambda _, answer: answer)
        [(_, answer)] = dispatch.answers
        result = answer.result(wire.now() - started, dispatch.attempts)
        expected.check(result)
        return result

    async def tokenize(
        self,
        wire: Wire,
        texts: Iterable[str],
        key: ModelKey,
        options: Options,
        truncate: bool | None,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        """Return the tokens of each text. If `truncate` is None, return all tokens."""

        def decode(message: Message, response: pb.TokenizeResponse) -> tuple[str, list[SequenceInfo]]:
            return response.fingerprint, sequence_infos(response, len(message.indices))

        items, is_one = read_inputs(texts, "texts")
        check_texts(items)
        check_function("progress", progress)
        if not items:
            return []
        template = pb.TokenizeRequest(
            model=key[0],
            model_version=key[1],
            prompt_name=options.prompt_name,
            task=options.task_number,
            truncation=pb.TRUNCATION_UNSPECIFIED if truncate is None else options.truncation,
            include_token_strings=options.include_token_strings,
            offset_unit=UNITS[options.offset_unit],
        )
        async with aclosing(wire):
            time_limit = self.time_limit(timeout_seconds, wire.now())
            info = await self._model_for(wire, key, options, time_limit)
            # Tokenize does not run the model, so the messages have no limit of tokens.
            limits = replace(self._limits(info, options), max_tokens=2**63)
            for _ in range(_MAX_ROUNDS):
                source = PlannedMessages(plan_messages(items, template, limits))
                dispatch: Dispatch[tuple[str, list[SequenceInfo]]] = self._dispatch(source, time_limit)
                await exchange(wire, "Tokenize", dispatch, decode, progress, len(items))
                answers = sorted(dispatch.answers, key=lambda answer: answer[0][0])
                fingerprints = {fingerprint for _, (fingerprint, _) in answers}
                if len(fingerprints) <= 1:
                    break
        for fingerprint in fingerprints:
            self.settings.expected.check_fingerprint(fingerprint)
            check_fingerprint(min(fingerprints), fingerprint)
        found = [info for _, (_, infos) in answers for info in infos]
        return found[0] if is_one else found

    async def rank(
        self,
        wire: Wire,
        query: str,
        documents: Any,
        key: ModelKey,
        options: ScoreOptions,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> list[tuple[int, float]]:
        """Return (index, score) of each document, the best first. `documents` has texts or vectors."""
        check_type("query", query, str, "a text")
        request = options.to_proto()
        vectors = as_vectors(documents)
        allowed = "a list of texts, or a list of vectors"
        items = check_documents(documents, "documents", allowed) if vectors is None else []
        if vectors is not None and options.max_document_tokens is not None:
            raise InvalidInputError(
                f"must be None for documents that are vectors; was {options.max_document_tokens}",
                field="max_document_tokens",
            )
        count = len(items) if vectors is None else len(vectors.lengths)
        if not count:
            return []
        request.MergeFrom(pb.ScoreRequest(query=query, document_vectors=vectors, top_k=options.top_k or count))
        answers = await self._score(
            wire, request, "documents", items, key, timeout_seconds, progress, partial(check_widths, documents)
        )
        found = [
            (indices[position], float(score))
            for indices, answer in answers
            for position, score in zip(answer.indices, answer.scores[:, 0], strict=True)
        ]
        found.sort(key=lambda pair: (-pair[1], pair[0]))
        return found[: options.top_k]

    async def score(
        self,
        wire: Wire,
        pairs: Iterable[tuple[str, str]],
        key: ModelKey,
        options: ScoreOptions,
        expected_fingerprint: str | None,
        timeout_seconds: float | None,
        progress: Progress | None,
        on_tokens: Callable[[int], None] | None,
    ) -> Array:
        """Return the scores of pairs, in order: (pairs,), or (pairs, labels) if the model has several labels."""
        check_type("expected_fingerprint", expected_fingerprint, (str, type(None)), "a str or None")
        check_function("on_tokens", on_tokens)
        items = check_pairs(pairs)
        request = options.to_proto()
        if not items:
            return np.empty(0, np.float32)
        answers = await self._score(
            wire, request, "pairs", items, key, timeout_seconds, progress, expected_fingerprint=expected_fingerprint
        )
        if on_tokens is not None:
            on_tokens(sum(answer.token_count for _, answer in answers))
        scores = np.concatenate([answer.scores for _, answer in answers])  # (pairs, labels)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    async def classify(
        self,
        wire: Wire,
        texts: Iterable[str],
        key: ModelKey,
        options: ScoreOptions,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Any:
        """Return the `Classification` of each text, in order. For a str, return one `Classification`."""
        is_one = isinstance(texts, str)
        items = check_documents([texts] if is_one else texts, "texts")
        request = options.to_proto()
        if not items:
            return []
        answers = await self._score(wire, request, "texts", items, key, timeout_seconds, progress)
        found = []
        for _, answer in answers:
            for scores in answer.scores:
                best = int(scores.argmax())
                found.append(Classification(answer.labels[best], float(scores[best]), scores, answer.labels))
        return found[0] if is_one else found

    async def _score(
        self,
        wire: Wire,
        template: pb.ScoreRequest,
        field: Field,
        items: Sequence[str | pb.TextPair],
        key: ModelKey,
        timeout_seconds: float | None,
        progress: Progress | None,
        check: Callable[[ModelInfo], None] = lambda _: None,
        *,
        expected_fingerprint: str | None = None,
    ) -> list[tuple[Sequence[int], ScoreAnswer]]:
        """Split documents, pairs or texts into messages, and send the messages.

        Document vectors are in `template`. `check` checks the inputs against the model. `expected_fingerprint` is the
        fingerprint of every answer; None for that of the settings.

        Returns:
            (indices of the inputs, answer) of each message, in the order of the inputs.
        """
        check_function("progress", progress)
        expected = self.settings.expected
        if expected_fingerprint is not None:
            expected = replace(expected, fingerprint=expected_fingerprint)
        template.model, template.model_version = key
        template.expected_fingerprint, template.expected_space_id = expected.fingerprint, expected.space_id
        template.priority = PRIORITIES[self.settings.priority]
        n_inputs = len(items) or len(template.document_vectors.lengths)

        def decode(message: Message, response: pb.ScoreResponse) -> ScoreAnswer:
            assert isinstance(message.request, pb.ScoreRequest)  # noqa: S101 - all messages of this call are
            return decode_scores(message.request, response, len(message.indices))

        async with aclosing(wire):
            time_limit = self.time_limit(timeout_seconds, wire.now())
            info = self._models.get(key) or await self._fetch_model(wire, key, time_limit)
            check(info)
            limits = score_limits(self._limits(info, Options()))
            for _ in range(_MAX_ROUNDS):
                messages = plan_scores(template, field, items, limits) if items else plan_vectors(template, limits)
                if self.settings.priority is None:
                    messages = as_bulk(messages, template)
                dispatch: Dispatch[ScoreAnswer] = self._dispatch(PlannedMessages(messages), time_limit)
                try:
                    await exchange(wire, "Score", dispatch, decode, progress, n_inputs)
                finally:
                    self._forget_limits(key, dispatch)
                answers = sorted(dispatch.answers, key=lambda answer: answer[0][0])
                if len({answer.fingerprint for _, answer in answers}) <= 1:
                    break
        for _, answer in answers:
            expected.check(answer)
            check_fingerprint(answers[0][1].fingerprint, answer.fingerprint)
        return answers

    async def list_models(self, wire: Wire, timeout_seconds: float | None) -> list[ModelInfo]:
        """Return the descriptions of all models."""
        time_limit = self.time_limit(timeout_seconds, wire.now())
        async with aclosing(wire):
            response = await self._ask(wire, "ListModels", pb.ListModelsRequest(), time_limit)
        return [model_info(model) for model in response.models]

    async def get_model(self, wire: Wire, key: ModelKey, timeout_seconds: float | None) -> ModelInfo:
        """Return the description of one model, and remember the description."""
        time_limit = self.time_limit(timeout_seconds, wire.now())
        async with aclosing(wire):
            return await self._fetch_model(wire, key, time_limit)

    def time_limit(self, timeout_seconds: float | None, now: float) -> TimeLimit:
        """Return the limit of a call that begins now. Without a timeout, the client's timeout limits each message."""
        if timeout_seconds is None:
            return TimeLimit(self.settings.timeout_seconds)
        timeout = as_float("timeout_seconds", timeout_seconds)
        if not timeout > 0:
            raise InvalidInputError(f"must be > 0; was {timeout}", field="timeout_seconds")
        return TimeLimit(timeout, now + timeout)

    async def _model_for(
        self,
        wire: Wire,
        key: ModelKey,
        options: Options,
        time_limit: TimeLimit,
        *,
        use_remembered: bool = True,
        request: pb.InspectRequest | None = None,
    ) -> ModelInfo:
        """Return the model of a call. `request` is the request of an `inspect` call.

        Raises:
            InvalidRequestError: The model does not support the options, or does not have a layer of the request.
        """

        def error_of(info: ModelInfo) -> InvalidRequestError | None:
            return capability_error(info, options) or layer_error(request, info)

        info = self._models.get(key) if use_remembered else None
        if info is not None and error_of(info) is None:
            return info
        info = await self._fetch_model(wire, key, time_limit)  # the server may have replaced the model
        if (error := error_of(info)) is not None:
            raise error
        return info

    def _forget_limits(self, key: ModelKey, dispatch: Dispatch[Any]) -> None:
        """Forget the model if a message was refused for its size, because the limits may be out of date."""
        if dispatch.saw_too_large:
            self._models.pop(key, None)

    def _request_template(self, key: ModelKey, options: Options) -> pb.EncodeRequest:
        """Return a request with all fields of a call except the inputs."""
        settings = self.settings
        return pb.EncodeRequest(
            model=key[0],
            model_version=key[1],
            options=options.to_proto(),
            expected_fingerprint=settings.expected.fingerprint,
            expected_space_id=settings.expected.space_id,
            priority=PRIORITIES[settings.priority],
        )

    def _limits(self, info: ModelInfo, options: Options) -> Limits:
        settings = self.settings
        token_bytes = reply_bytes_per_token(info, options)
        return Limits.of(info, settings.max_message_bytes, settings.max_concurrent_messages, token_bytes)

    async def _fetch_model(self, wire: Wire, key: ModelKey, time_limit: TimeLimit) -> ModelInfo:
        request = pb.GetModelRequest(model=key[0], model_version=key[1])
        response = await self._ask(wire, "GetModel", request, time_limit)
        if not response.HasField("model") or response.model.d_model < 1:
            raise ProtocolError("the answer to GetModel must describe a model with d_model >= 1")
        self._models[key] = info = model_info(response.model)
        return info

    async def _ask(
        self, wire: Wire, rpc: Rpc, request: pb.GetModelRequest | pb.ListModelsRequest, time_limit: TimeLimit
    ) -> Any:
        dispatch: Dispatch[Any] = self._dispatch(PlannedMessages([Message(request)]), time_limit)
        await exchange(wire, rpc, dispatch, lambda _, response: response)
        return dispatch.answers[0][1]

    def _dispatch(
        self, source: MessageSource, time_limit: TimeLimit, rejected: dict[int, EncserveError] | None = None
    ) -> Dispatch[Any]:
        settings = self.settings
        return Dispatch(
            source,
            settings.retry,
            time_limit,
            settings.max_concurrent_messages,
            Outages(self.history, settings.target, settings.on_outage),
            settings.random,
            settings.target,
            rejected,
        )


async def exchange(
    wire: Wire,
    rpc: Rpc,
    dispatch: Dispatch[R],
    decode: Callable[[Message, Any], R],
    progress: Progress | None = None,
    n_inputs: int = 0,
) -> None:
    """Send the messages of a call until all are answered or have failed. The caller must close the wire.

    `progress` runs after each attempt of a message, and at least every second. So an exception of `progress` can end a
    call to a server that does not answer. Arguments: the number of finished inputs, and `n_inputs`.

    Raises:
        EncserveError: A message failed, and the failure ends the call.
    """
    while True:
        _check_failures(dispatch)
        dispatch.send(wire, rpc, may_block=progress is None)
        _check_failures(dispatch)  # `send` records the messages whose time is over
        if dispatch.is_done:
            return
        seconds = dispatch.seconds_to_wait(wire.now())
        if progress is not None:
            seconds = _PROGRESS_SECONDS if seconds is None else min(seconds, _PROGRESS_SECONDS)
        event = await wire.wait(seconds)
        dispatch.record(event, decode, wire.now())
        if progress is not None:
            progress(dispatch.n_finished, n_inputs)


def _check_failures(dispatch: Dispatch[Any]) -> None:
    if dispatch.failure is not None and dispatch.failed_in_a_row >= _MOST_FAILED_IN_A_ROW:
        raise dispatch.failure
