"""What every protocol does with its calls: whether they are taken, which model they are for, how they are answered."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from encserve_server.errors import Draining, ResponseTooLarge
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import EncodeCall, EncodeReply, ServedModel, TokenizeCall, TokenizeReply
from encserve_server.system.clock import Clock
from encserve_server.telemetry import spans

# A reply larger than this is built in a thread: on the event loop it would hold up everybody else.
_INLINE_REPLY_BYTES = 256 * 1024


class Calls:
    """The calls of all protocols together; owned by the event loop.

    Attributes:
        in_flight: How many calls are being worked on, or have their answer on its way; any thread may read it.
        idle: Set while there are none.
        draining: Set from when new calls are refused.
    """

    def __init__(self, catalog: Catalog, clock: Clock, encode_pool: Executor) -> None:
        """Takes the models, and the threads in which large replies are built."""
        self._catalog = catalog
        self._clock = clock
        self._encode_pool = encode_pool
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = asyncio.Event()

    def opened(self) -> None:
        """A call has come."""
        self.in_flight += 1
        self.idle.clear()

    def closed(self) -> None:
        """A call has been answered, or its caller has gone."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    def drain(self) -> None:
        """From now on new calls get Draining."""
        self.draining.set()

    def refuse_while_draining(self) -> None:
        """To be called before anything is done for a call.

        Raises:
            Draining: The server is stopping.
        """
        if self.draining.is_set():
            raise Draining("the server is stopping; send the request to another")

    def resolve(
        self, sequences: int, name: str, version: str, fingerprint: str = "", space_id: str = ""
    ) -> ServedModel:
        """The model that so many sequences are for, as `Catalog.resolve` finds it; tells the call's span of it."""
        model = self._catalog.resolve(name, version, fingerprint, space_id)
        if (span := spans.current()) is not None:
            span.about(model.bundle.name, model.bundle.version, sequences)
        return model

    async def encode(
        self,
        model: ServedModel,
        count: int,
        deadline: float,
        *,
        count_tokens: Callable[[], int | None],
        decode: Callable[[], EncodeCall],
        build: Callable[[EncodeCall, EncodeReply], bytes],
        growth: float = 1.0,
    ) -> bytes:
        """Answers a call.

        Args:
            model: The model, as `resolve` gave it in this turn of the event loop.
            count: How many inputs there are.
            deadline: When the caller is gone, on the clock; infinity for never.
            count_tokens: As of `Scheduler.check_open`.
            decode: Makes the call; only called when it may be taken, since refusing must not cost what answering does.
            build: Makes the reply's bytes; called in a thread where there are many.
            growth: How many bytes those are, at most, for each that a model reckons with: 1 for raw numbers.

        Raises:
            ResponseTooLarge: The reply is larger than it was reckoned.
            EncserveError: Whatever the functions, and `ServedModel`, raise.
        """
        model.check_count(count)
        model.check_open(count_tokens)
        call = decode()
        with model.in_use():
            reply = await model.encode(call, deadline)
            return await self._answer(model, partial(build, call, reply), "inputs", reply.estimated_bytes, growth)

    async def tokenize(
        self, model: ServedModel, call: TokenizeCall, build: Callable[[TokenizeReply], bytes], growth: float = 1.0
    ) -> bytes:
        """Answers a call that only tokenizes, whether or not the model is ready; for the rest see `encode`."""
        with model.in_use():
            reply = await model.tokenize(call)
            return await self._answer(model, partial(build, reply), "texts", reply.estimated_bytes, growth)

    async def _answer(
        self, model: ServedModel, build: Callable[[], bytes], field: str, estimated_bytes: int, growth: float
    ) -> bytes:
        """What `build` makes, in a thread where that is much; `field` is where the call's inputs are."""
        span = spans.current()

        def answer() -> bytes:
            began = self._clock.now()
            data = build()
            ended = self._clock.now()
            if span is not None:
                span.stage("encode", began, ended)
            limit = round(model.limits.max_response_bytes * growth)
            if len(data) > limit:  # the estimate was wrong; callers' own limits would fail the call without a reason
                raise ResponseTooLarge(field, f"the reply takes {len(data)} bytes, over the limit of {limit}")
            model.answered(ended - began, len(data))
            return data

        if estimated_bytes * growth <= _INLINE_REPLY_BYTES:
            return answer()
        return await asyncio.get_running_loop().run_in_executor(self._encode_pool, answer)
