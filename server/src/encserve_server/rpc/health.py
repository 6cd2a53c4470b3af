"""grpc.health.v1, driven by what the engines really do."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

from encserve_server.models.served import ServedModel
from encserve_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# A batch that is stuck sends no event, so health also looks by itself.
_POLL_SECONDS = 1.0


class Health:
    """Keeps the health service in step with the models.

    Three kinds of names: "" and the encoder service, SERVING while every model is ready; and `SERVICE/MODEL` for each
    model alone, for balancers that route by model. `encserve_ready` says the same of each version.
    """

    def __init__(self, service_name: str, metrics: Metrics) -> None:
        """Starts with everything NOT_SERVING."""
        self.servicer = health.aio.HealthServicer()
        self._service_name = service_name
        self._metrics = metrics
        self._models: Sequence[ServedModel] = ()
        self._changed = asyncio.Event()
        self._said: dict[str, bool] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Says NOT_SERVING; the servicer by itself would begin with SERVING."""
        await self._say({"": False, self._service_name: False})

    def watch(self, models: Sequence[ServedModel]) -> None:
        """Follows these models, and no others, from now on."""
        for name, version in {it.key for it in self._models} - {it.key for it in models}:
            self._metrics.ready.labels(name, version).set(0)
        self._models = models
        self._changed.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow(), name="encserve-health")

    def changed(self) -> None:
        """To be called when a model's readiness may have changed."""
        self._changed.set()

    async def shut_down(self) -> None:
        """Says NOT_SERVING for good."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for model in self._models:
            self._metrics.ready.labels(*model.key).set(0)
        await self.servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        states: dict[str, bool] = {}
        for model in self._models:
            reason = model.not_ready_reason()
            name = f"{self._service_name}/{model.bundle.name}"
            states[name] = states.get(name, True) and not reason
            self._metrics.ready.labels(*model.key).set(not reason)
            if reason and self._said.get(name):
                logger.error("not serving", extra={"model": model.bundle.name, "reason": reason})
        all_ready = all(states.values())
        await self._say({"": all_ready, self._service_name: all_ready, **states})

    async def _say(self, states: dict[str, bool]) -> None:
        """Publishes what has changed; watchers are woken only then."""
        for name, ready in states.items():
            if self._said.get(name) != ready:
                self._said[name] = ready
                await self.servicer.set(name, _SERVING if ready else _NOT_SERVING)
