"""Everything that a client does, written once for both: over a `Wire`, with no I/O of its own."""

import random as random_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from encserve_client._arguments import as_float
from encserve_client._logic.answers import (
    Part,
    check_expected,
    decode_response,
    empty_result,
    merge_parts,
    model_info,
)
from encserve_client._logic.dispatch import Dispatch
from encserve_client._logic.failures import CallInfo
from encserve_client._logic.inspecting import Gathering
from encserve_client._logic.planning import Limits, Message, plan_messages
from encserve_client._logic.wire import Answered, Failed, Rpc, Wire
from encserve_client.exceptions import ProtocolError
from encserve_client.inputs import Input
from encserve_client.options import Options
from encserve_client.results import EncodeResult, InspectResult, ModelInfo
from encserve_client.retry import RetryPolicy
from encserve_proto.v1 import encoder_pb2 as pb

R = TypeVar("R")
ModelKey = tuple[str, str]

# How often a call is made whose answers are of different versions: the model was replaced in the middle of it.
_MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's settings; see `EncoderClient`."""

    timeout_seconds: float
    max_message_bytes: int
    max_concurrent_messages: int
    retry: RetryPolicy
    random: Callable[[], float] = random_module.random
    target: str = ""
    expected_fingerprint: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError with the setting, its bound and the value."""
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be > 0; was {self.timeout_seconds}")
        if self.max_message_bytes < 1:
            raise ValueError(f"max_message_bytes must be >= 1; was {self.max_message_bytes}")
        if self.max_concurrent_messages < 1:
            raise ValueError(f"max_concurrent_messages must be >= 1; was {self.max_concurrent_messages}")


def request_template(key: ModelKey, options: Options, expected_fingerprint: str) -> pb.EncodeRequest:
    """What every request of a call has in common: all but its inputs."""
    return pb.EncodeRequest(
        model=key[0], model_version=key[1], options=options.to_proto(), expected_fingerprint=expected_fingerprint
    )


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a call must be over.

    Attributes:
        at: On the wire's clock, in seconds.
        seconds: How long after the call's beginning that is.
    """

    at: float
    seconds: float


class Core:
    """The logic of a client. One per client, shared by its threads or tasks.

    `_models` is the only thing that changes: entries are set and dropped whole, which a dict does atomically.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._models: dict[ModelKey, ModelInfo] = {}

    async def encode(
        self,
        wire: Wire,
        inputs: Sequence[Input],
        key: ModelKey,
        options: Options,
        timeout_seconds: float | None,
        *,
        describe: bool = False,
    ) -> EncodeResult:
        """Cuts checked inputs into messages, has them answered, and puts the answers together.

        `describe`: whether the result says what the model saw of each input.
        """
        deadline = self.deadline(timeout_seconds, wire.now())
        try:
            return await self._encode(wire, inputs, key, options, deadline, describe)
        finally:
            await wire.aclose()

    async def inspect(self, wire: Wire, request: pb.InspectRequest, timeout_seconds: float | None) -> InspectResult:
        """Has one input looked into."""
        started = wire.now()
        request.expected_fingerprint = self.settings.expected_fingerprint
        try:
            dispatch: Dispatch[Gathering] = self._dispatch([Message(request)], self.deadline(timeout_seconds, started))
            await exchange(wire, "Inspect", dispatch, lambda _, answer: answer)
        finally:
            await wire.aclose()
        [(_, answer)] = dispatch.answers
        result = answer.result(wire.now() - started, dispatch.attempts)
        check_expected(self.settings.expected_fingerprint, result.fingerprint)
        return result

    async def list_models(self, wire: Wire, timeout_seconds: float | None) -> list[ModelInfo]:
        """Asks for every model."""
        deadline = self.deadline(timeout_seconds, wire.now())
        try:
            response = await self._ask(wire, "ListModels", pb.ListModelsRequest(), deadline)
        finally:
            await wire.aclose()
        return [model_info(model) for model in response.models]

    async def get_model(self, wire: Wire, key: ModelKey, timeout_seconds: float | None) -> ModelInfo:
        """Asks for one model, and remembers it."""
        deadline = self.deadline(timeout_seconds, wire.now())
        try:
            return await self._fetch_model(wire, key, deadline)
        finally:
            await wire.aclose()

    def deadline(self, timeout_seconds: float | None, now: float) -> Deadline:
        """When a call that begins now must be over; None stands for the client's own timeout."""
        timeout = self.settings.timeout_seconds
        if timeout_seconds is not None:
            timeout = as_float("timeout_seconds", timeout_seconds)
        if not timeout > 0:
            raise ValueError(f"timeout_seconds must be > 0; was {timeout}")
        return Deadline(now + timeout, timeout)

    async def _encode(
        self, wire: Wire, inputs: Sequence[Input], key: ModelKey, options: Options, deadline: Deadline, describe: bool
    ) -> EncodeResult:
        started = wire.now()
        if not inputs:  # the answer is all about the model, so what is remembered of it will not do
            info = await self._fetch_model(wire, key, deadline)
            check_expected(self.settings.expected_fingerprint, info.fingerprint)
            return empty_result(info, options, wire.now() - started)
        info = self._models.get(key) or await self._fetch_model(wire, key, deadline)
        parts: list[Part] = []
        attempts = 0
        for _ in range(_MOST_ROUNDS):
            dispatch = await self._encode_all(wire, inputs, key, options, deadline, describe, info)
            attempts += dispatch.attempts
            parts = [part for _, part in sorted(dispatch.answers, key=lambda answer: answer[0])]
            if len({part.fingerprint for part in parts}) == 1:
                break
        result = merge_parts(parts, wire.now() - started, attempts)
        check_expected(self.settings.expected_fingerprint, result.fingerprint)
        return result

    async def _encode_all(
        self,
        wire: Wire,
        inputs: Sequence[Input],
        key: ModelKey,
        options: Options,
        deadline: Deadline,
        describe: bool,
        info: ModelInfo,
    ) -> Dispatch[Part]:
        """Has every input encoded once; the answers' fingerprints may differ."""
        limits = Limits.of(info, self.settings.max_message_bytes, self.settings.max_concurrent_messages)
        template = request_template(key, options, self.settings.expected_fingerprint)
        dispatch: Dispatch[Part] = self._dispatch(plan_messages(inputs, template, options, limits), deadline)
        try:
            await exchange(
                wire,
                "Encode",
                dispatch,
                lambda message, response: decode_response(response, options, message.n_inputs, describe=describe),
            )
        finally:
            if dispatch.saw_too_large:  # the limits that the plan was made for may be out of date
                self._models.pop(key, None)
        return dispatch

    async def _fetch_model(self, wire: Wire, key: ModelKey, deadline: Deadline) -> ModelInfo:
        request = pb.GetModelRequest(model=key[0], model_version=key[1])
        response = await self._ask(wire, "GetModel", request, deadline)
        if not response.HasField("model") or response.model.d_model < 1:
            raise ProtocolError("the answer to GetModel must describe a model with d_model >= 1")
        self._models[key] = info = model_info(response.model)
        return info

    async def _ask(
        self, wire: Wire, rpc: Rpc, request: pb.GetModelRequest | pb.ListModelsRequest, deadline: Deadline
    ) -> Any:
        dispatch: Dispatch[Any] = self._dispatch([Message(request)], deadline)
        await exchange(wire, rpc, dispatch, lambda _, response: response)
        return dispatch.answers[0][1]

    def _dispatch(self, messages: Iterable[Message], deadline: Deadline) -> Dispatch[Any]:
        settings = self.settings
        call = CallInfo(settings.target, deadline.seconds)
        return Dispatch(messages, settings.retry, deadline.at, settings.max_concurrent_messages, settings.random, call)


async def exchange(wire: Wire, rpc: Rpc, dispatch: Dispatch[R], decode: Callable[[Message, Any], R]) -> None:
    """Sends a call's messages until all are answered or one fails for good; the wire's owner cleans up."""
    while True:
        taken = dispatch.take(wire.now())
        for message in taken:
            wire.start(rpc, message, dispatch.seconds_left(wire.now()), alone=dispatch.is_alone)
        if dispatch.done:
            return
        event = await wire.wait(dispatch.seconds_to_wait(wire.now()))
        if isinstance(event, Answered):
            dispatch.answered(event.message, decode(event.message, event.response))
        elif isinstance(event, Failed):
            dispatch.failed(event.message, event.failure, wire.now())
