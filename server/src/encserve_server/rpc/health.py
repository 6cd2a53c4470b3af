"""grpc.health.v1, driven by the state of the engines."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from grpc_health.v1 import health_pb2

from encserve_server.errors import Draining, ModelNotFound
from encserve_server.models.served import ServedModel
from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Context, Handler, RpcGuard
from encserve_server.system.background import repeat
from encserve_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
METHODS = {"Check": "unary", "Watch": "server_stream"}

_STATUSES = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
    None: health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
}
# A batch that is stuck sends no event, so health also looks by itself.
_POLL_SECONDS = 1.0


class HealthService:
    """The handlers of grpc.health.v1.Health.

    Not the library's: it holds a lock while it writes to a watcher, so that one who does not read would stop health
    for everybody, and the server's end.

    Attributes:
        serving: Each name, and whether it serves; any thread may read it.
    """

    def __init__(self) -> None:
        """Knows no name."""
        self.serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._ending = False

    def handlers(self, guard: RpcGuard) -> dict[str, Handler]:
        """The methods by their names."""
        return {"Check": guard.check(self.check), "Watch": guard.watch(self.watch)}

    def set_status(self, serving: Mapping[str, bool]) -> None:
        """Sets names to SERVING or NOT_SERVING; watchers are woken only by a change."""
        if not serving.items() <= self.serving.items():
            self.serving |= serving
            self._wake_watchers()

    def end(self) -> None:
        """Ends the calls of watchers, each after the last status has been sent to it."""
        self._ending = True
        self._wake_watchers()

    async def check(self, data: bytes, context: Context) -> bytes:
        """The status of a name now."""
        del context
        name = parse(health_pb2.HealthCheckRequest, data).service
        if name not in self.serving:
            # Not those of models: callers need no key.
            services = ", ".join(repr(it) for it in self.serving if "/" not in it)
            raise ModelNotFound("service", f"must be one of {services}, or SERVICE/MODEL for one model")
        return self._response(name)

    async def watch(self, data: bytes, context: Context) -> None:
        """The status of a name, now and whenever it changes."""
        name = parse(health_pb2.HealthCheckRequest, data).service
        last_sent = b""
        while True:
            changed, response = self._changed, self._response(name)
            if response != last_sent:
                await context.write(response)
                last_sent = response
            elif self._ending:
                raise Draining("the server is stopping")
            else:
                await changed.wait()

    def _response(self, name: str) -> bytes:
        return health_pb2.HealthCheckResponse(status=_STATUSES[self.serving.get(name)]).SerializeToString()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ModelHealth:
    """Keeps the health service in step with the models.

    Two kinds of names: "" and those of services, SERVING while every model is ready; and `SERVICE/MODEL`, of the
    encoder service, for each model alone, for balancers that route by model. `encserve_ready` says the same of each
    version.
    """

    def __init__(
        self, service: HealthService, encoder_name: str, metrics: Metrics, other_names: Sequence[str] = ()
    ) -> None:
        """Begins with NOT_SERVING; takes the full names of the encoder service and of other services."""
        self._service = service
        self._names = ("", encoder_name, *other_names)
        self._service.set_status(dict.fromkeys(self._names, False))
        self._encoder_name = encoder_name
        self._metrics = metrics
        self._models: Sequence[ServedModel] = ()
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    def watch(self, models: Sequence[ServedModel]) -> None:
        """Follows these models, and no others, from now on."""
        for name, version in {model.key for model in self._models} - {model.key for model in models}:
            self._metrics.ready.labels(name, version).set(0)
        self._models = models
        self._changed.set()
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(
                repeat(self._look, _POLL_SECONDS, wake=self._changed), name="encserve-health"
            )

    def changed(self) -> None:
        """To be called when a model's readiness may have changed."""
        self._changed.set()

    async def shut_down(self) -> None:
        """Sets NOT_SERVING for good."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        for model in self._models:
            self._metrics.ready.labels(*model.key).set(0)
        self._service.set_status(dict.fromkeys(self._service.serving, False))

    def _look(self) -> None:
        serving: dict[str, bool] = {}
        for model in self._models:
            reason = model.not_ready_reason()
            name = f"{self._encoder_name}/{model.bundle.name}"
            serving[name] = serving.get(name, True) and not reason
            self._metrics.ready.labels(*model.key).set(not reason)
            if reason and self._service.serving.get(name):
                logger.error("not serving", extra={"model": model.bundle.name, "reason": reason})
        all_serve = all(serving.values())
        self._service.set_status(dict.fromkeys(self._names, all_serve) | serving)
