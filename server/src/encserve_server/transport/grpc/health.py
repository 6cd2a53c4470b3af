"""grpc.health.v1: reports whether models and services are ready."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from grpc_health.v1 import health_pb2

from encserve_server.endpoints.rpcs import parse
from encserve_server.errors import Draining, ModelNotFound
from encserve_server.models.served import ServedModel
from encserve_server.system.background import repeat
from encserve_server.telemetry.metrics import Metrics
from encserve_server.transport.grpc.connections import Context
from encserve_server.transport.grpc.guard import Handler, RpcGuard

logger = logging.getLogger(__name__)

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
METHODS = {"Check": "unary", "Watch": "server_stream"}

_STATUSES = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
    None: health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
}
# A stuck batch causes no event, so readiness is also polled.
_POLL_SECONDS = 1.0


class HealthService:
    """The handlers of grpc.health.v1.Health.

    The grpcio library also has such a class, but it holds a lock while it writes to a watcher. There, a watcher that
    does not read would block the health checks of all callers, and the stop of the server.

    Attributes:
        serving: For each name of a service or model: whether its status is SERVING. Any thread may read this.
    """

    def __init__(self) -> None:
        """Start without names."""
        self.serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._ending = False

    def handlers(self, guard: RpcGuard) -> dict[str, Handler]:
        """Return the handlers by method name."""
        return {"Check": guard.check(self.check), "Watch": guard.watch(self.watch)}

    def set_status(self, serving: Mapping[str, bool]) -> None:
        """Set names to SERVING or NOT_SERVING. Watchers wake only if a status changes."""
        if not serving.items() <= self.serving.items():
            self.serving |= serving
            self._wake_watchers()

    def end(self) -> None:
        """End all watches. Before this, each watcher gets the last status."""
        self._ending = True
        self._wake_watchers()

    async def check(self, data: bytes, context: Context) -> bytes:
        """Return the status of a name."""
        del context
        name = parse(health_pb2.HealthCheckRequest, data).service
        if name not in self.serving:
            # The names of models are left out, because a caller without a key gets this error too.
            services = ", ".join(repr(it) for it in self.serving if "/" not in it)
            raise ModelNotFound("service", f"must be one of {services}, or SERVICE/MODEL for one model")
        return self._response(name)

    async def watch(self, data: bytes, context: Context) -> None:
        """Send the status of a name: first the current status, then each change."""
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
    """Updates the health service and the metric `encserve_ready` when the readiness of a model changes.

    The status of the server (the empty name) and of each service is SERVING while all models are ready.
    `SERVICE/MODEL` is the status of one model, for load balancers that route by model. SERVICE is the name of the main
    service. `encserve_ready` is the status of each version.
    """

    def __init__(self, service: HealthService, services: Sequence[str], metrics: Metrics) -> None:
        """Start with NOT_SERVING. `services` are the full names of the services, the main service first."""
        self._service = service
        self._names = ("", *services)
        self._service.set_status(dict.fromkeys(self._names, False))
        self._main_name = services[0]
        self._metrics = metrics
        self._models: Sequence[ServedModel] = ()
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def watch(self, models: Sequence[ServedModel]) -> None:
        """Watch these models instead of the previous models."""
        for name, version in {model.key for model in self._models} - {model.key for model in models}:
            self._metrics.ready.labels(name, version).set(0)
        self._models = models
        self._changed.set()
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(
                repeat(self._look, _POLL_SECONDS, wake=self._changed), name="encserve-health"
            )

    def changed(self) -> None:
        """Check the readiness of all models soon. Call this if the readiness of a model may have changed."""
        self._changed.set()

    async def shut_down(self) -> None:
        """Set NOT_SERVING, and stop watching the models."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        for model in self._models:
            self._metrics.ready.labels(*model.key).set(0)
        self._service.set_status(dict.fromkeys(self._service.serving, False))

    def _look(self) -> None:
        serving: dict[str, bool] = {}
        for model in self._models:
            reason = model.not_ready_reason()
            name = f"{self._main_name}/{model.bundle.name}"
            serving[name] = serving.get(name, True) and not reason
            self._metrics.ready.labels(*model.key).set(not reason)
            if reason and self._service.serving.get(name):
                logger.error("not serving", extra={"model": model.bundle.name, "reason": reason})
        all_serve = all(serving.values())
        self._service.set_status(dict.fromkeys(self._names, all_serve) | serving)
