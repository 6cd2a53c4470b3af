"""The methods of a client, over a `Wire`. Both clients share this code."""

import random as random_module
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from encserve_client._arguments import as_float
from encserve_client._logic.answers import (
    ExpectedIds,
    MessageAnswer,
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
from encserve_client._logic.scores import Field, ScoreAnswer, decode_scores, plan_scores, score_limits
from encserve_client._logic.streams import Result, Stream, StreamMessages, StreamOptions
from encserve_client._logic.wire import Rpc, Wire
from encserve_client.exceptions import (
    EncserveError,
    InvalidInputError,
    InvalidRequestError,
    ProtocolError,
)
from encserve_client.inputs import Input, SpanInput
from encserve_client.options import PRIORITIES, Array, Options, Priority, Progress, check_choice
from encserve_client.results import EncodeResult, InspectResult, ModelInfo, SequenceInfo, SparseVector
from encserve_client.retry import OnOutage, RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")
ModelKey = tuple[str, str]

# A call sends all messages again if the model was replaced meanwhile: at most this many rounds in total.
_MAX_ROUNDS = 3
# A call ends after this many failed messages in a row. Otherwise a dead server would delay each message in turn.
_MOST_FAILED_IN_A_ROW = 8


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


def request_template(key: ModelKey, options: Options, settings: Settings) -> pb.EncodeRequest:
    """Return a request with all fields of a call except the inputs."""
    expected = settings.expected
    return pb.EncodeRequest(
        model=key[0],
        model_version=key[1],
        options=options.to_proto(),
        expected_fingerprint=expected.fingerprint,
        expected_space_id=expected.space_id,
        priority=PRIORITIES[settings.priority],
    )


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
        started = wire.now()
        time_limit = self.time_limit(timeout_seconds, started)
        expected = self.settings.expected
        async with aclosing(wire):
            # Without inputs, the result needs the model's description. A remembered description may be out of date.
            known = self._models.get(key)
            use_remembered = bool(inputs) and known is not None and not input_errors(known, inputs)
            info = await self._model_for(
                partial(capability_error, options=options), wire, key, time_limit, use_remembered=use_remembered
            )
            refused = input_errors(info, inputs)
            if refused and not describe:
                raise next(iter(refused.values()))
            if not inputs:
                expected.check(info)
                return empty_result(info, options, {}, wire.now() - started, 0)
            limits = self._limits(info, options)
            template = request_template(key, options, self.settings)
            attempts = 0
            for _ in range(_MAX_ROUNDS):
                rejected = dict(refused) if describe else None
                messages = plan_messages(inputs, template, limits, rejected)
                if self.settings.priority is None:
                    messages = as_bulk(messages, template)
                dispatch: Dispatch[MessageAnswer] = self._dispatch(PlannedMessages(messages), time_limit, rejected)
                await self._exchange_encode_messages(wire, dispatch, key, options, describe, progress, len(inputs))
                attempts += dispatch.attempts
                answers = sorted(dispatch.answers, key=lambda pair: pair[0])
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

    async def stream(
        self, wire: Wire, key: ModelKey, options: Options, time_limit: TimeLimit, stream: StreamOptions
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Read and send inputs. Yield (index, result or error) for each input.

        A result is (width,) for a pooled output, a `SparseVector` for "sparse", and (rows, width) otherwise.

        Raises:
            FingerprintError: The model was replaced during the call.
            EncserveError: The call as a whole failed.
        """
        fingerprint = self.settings.expected.fingerprint

        def decode(message: Message, response: pb.EncodeResponse) -> Sequence[Array | SparseVector]:
            nonlocal fingerprint
            answer = decode_response(response, options, message.n_inputs, describe=False)
            self.settings.expected.check(answer)
            fingerprint = fingerprint or answer.fingerprint
            check_fingerprint(fingerprint, answer.fingerprint)
            block = answer.blocks[0]
            if options.outputs[0].kind == "sparse":
                return block.sparse_vectors(info.sparse_width)
            return list(block.rows.copy()) if options.outputs[0].is_pooled else block.split()

        concurrent = self.settings.max_concurrent_messages
        async with aclosing(wire):
            # The width of a sparse vector comes from the model, so the description must be current.
            use_remembered = options.outputs[0].kind != "sparse"
            info = await self._model_for(
                partial(capability_error, options=options), wire, key, time_limit, use_remembered=use_remembered
            )
            limits = self._limits(info, options)
            share = max(stream.max_in_flight // concurrent, 1)  # so that several messages can be in flight
            limits = replace(limits, max_sequences=min(limits.max_sequences, share))
            source = StreamMessages(MessageBuilder(request_template(key, options, self.settings), limits))
            dispatch: Dispatch[Sequence[Array | SparseVector]] = self._dispatch(source, time_limit, rejected={})
            try:
                async with aclosing(Stream(wire, source, dispatch, decode, stream).results()) as results:
                    async for result in results:
                        yield result
            finally:
                if dispatch.saw_too_large:  # the remembered limits may be out of date
                    self._models.pop(key, None)

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
            await self._model_for(
                lambda info: capability_error(info, options) or layer_error(request, info), wire, key, time_limit
            )
            await exchange(wire, "Inspect", dispatch, lambda _, answer: answer)
        [(_, answer)] = dispatch.answers
        result = answer.result(wire.now() - started, dispatch.attempts)
        expected.check(result)
        return result

    async def tokenize(
        self,
        wire: Wire,
        texts: Sequence[str],
        key: ModelKey,
        options: Options,
        template: pb.TokenizeRequest,
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> list[SequenceInfo]:
        """Split the texts into messages, send the messages, and merge the answers."""
        async with aclosing(wire):
            time_limit = self.time_limit(timeout_seconds, wire.now())
            info = await self._model_for(partial(capability_error, options=options), wire, key, time_limit)
            # Only the model's computations limit the number of tokens.
            limits = replace(self._limits(info, options), max_tokens=2**63)

            def decode(message: Message, response: pb.TokenizeResponse) -> tuple[str, list[SequenceInfo]]:
                return response.fingerprint, sequence_infos(response, message.n_inputs)

            for _ in range(_MAX_ROUNDS):
                source = PlannedMessages(plan_messages(texts, template, limits))
                dispatch: Dispatch[tuple[str, list[SequenceInfo]]] = self._dispatch(source, time_limit)
                await exchange(wire, "Tokenize", dispatch, decode, progress, len(texts))
                answers = sorted(dispatch.answers, key=lambda answer: answer[0])
                fingerprints = {fingerprint for _, (fingerprint, _) in answers}
                if len(fingerprints) <= 1:
                    break
        for fingerprint in fingerprints:
            self.settings.expected.check_fingerprint(fingerprint)
            check_fingerprint(min(fingerprints), fingerprint)
        return [info for _, (_, infos) in answers for info in infos]

    async def score(
        self,
        wire: Wire,
        template: pb.ScoreRequest,
        field: Field,
        items: Sequence[str | pb.TextPair],
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> list[tuple[int, ScoreAnswer]]:
        """Split documents, pairs or texts into messages, and send the messages.

        Document vectors are in `template`, in one message.

        Returns:
            (index of the first input, answer) of each message, in the order of the inputs.
        """
        key, expected = (template.model, template.model_version), self.settings.expected
        template.expected_fingerprint, template.expected_space_id = expected.fingerprint, expected.space_id
        template.priority = PRIORITIES[self.settings.priority]

        def decode(message: Message, response: pb.ScoreResponse) -> ScoreAnswer:
            assert isinstance(message.request, pb.ScoreRequest)  # noqa: S101 - the messages of this call
            return decode_scores(message.request, response, message.n_inputs)

        async with aclosing(wire):
            time_limit = self.time_limit(timeout_seconds, wire.now())
            limits = score_limits(self._limits(await self._model_for(lambda _: None, wire, key, time_limit), Options()))
            n_inputs = len(items) or len(template.document_vectors.lengths)
            for _ in range(_MAX_ROUNDS):
                messages = plan_scores(template, field, items, limits) if items else iter([Message(template)])
                if self.settings.priority is None:
                    messages = as_bulk(messages, template)
                dispatch: Dispatch[ScoreAnswer] = self._dispatch(PlannedMessages(messages), time_limit)
                try:
                    await exchange(wire, "Score", dispatch, decode, progress, n_inputs)
                finally:
                    if dispatch.saw_too_large:  # the remembered limits may be out of date
                        self._models.pop(key, None)
                answers = sorted(dispatch.answers, key=lambda answer: answer[0])
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
        """Return the limit of a call that begins now. None: the client's timeout limits each message."""
        if timeout_seconds is None:
            return TimeLimit(self.settings.timeout_seconds)
        timeout = as_float("timeout_seconds", timeout_seconds)
        if not timeout > 0:
            raise InvalidInputError(f"must be > 0; was {timeout}", field="timeout_seconds")
        return TimeLimit(timeout, now + timeout)

    async def _exchange_encode_messages(
        self,
        wire: Wire,
        dispatch: Dispatch[MessageAnswer],
        key: ModelKey,
        options: Options,
        describe: bool,
        progress: Progress | None,
        n_inputs: int,
    ) -> None:
        """Send all messages of a call once. The fingerprints of the answers may differ."""

        def decode(message: Message, response: pb.EncodeResponse) -> MessageAnswer:
            return decode_response(response, options, message.n_inputs, describe=describe)

        try:
            await exchange(wire, "Encode", dispatch, decode, progress, n_inputs)
        finally:
            if dispatch.saw_too_large:  # the remembered limits may be out of date
                self._models.pop(key, None)

    async def _model_for(
        self,
        error_of: Callable[[ModelInfo], InvalidRequestError | None],
        wire: Wire,
        key: ModelKey,
        time_limit: TimeLimit,
        *,
        use_remembered: bool = True,
    ) -> ModelInfo:
        """Return the model of a call. `error_of` returns the error if a model does not support the call.

        Raises:
            InvalidRequestError: The model does not support the call.
        """
        info = self._models.get(key) if use_remembered else None
        if info is not None and error_of(info) is None:
            return info
        info = await self._fetch_model(wire, key, time_limit)  # the server may have replaced the model
        if (error := error_of(info)) is not None:
            raise error
        return info

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

    `progress` runs after each attempt of a message. Arguments: the number of finished inputs, and `n_inputs`.

    Raises:
        EncserveError: A message failed, and the failure ends the call.
    """
    while True:
        _check_failures(dispatch)
        dispatch.send(wire, rpc, may_block=True)
        _check_failures(dispatch)  # `send` records the messages whose time is over
        if dispatch.is_done:
            return
        event = await wire.wait(dispatch.seconds_to_wait(wire.now()))
        dispatch.record(event, decode, wire.now())
        if event is not None and progress is not None:
            progress(dispatch.n_finished, n_inputs)


def _check_failures(dispatch: Dispatch[Any]) -> None:
    if dispatch.failure is not None and dispatch.failed_in_a_row >= _MOST_FAILED_IN_A_ROW:
        raise dispatch.failure
