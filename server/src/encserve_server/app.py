"""The composition root: what is built, and in which order it starts, drains and stops.

Start: the metrics page, gRPC with health (NOT_SERVING), and HTTP if it is wanted; then each model is verified, loaded
and warmed up in a thread; only then health says SERVING. From then on the manager follows the model repository. Stop:
health says NOT_SERVING; when balancers have had time to see it, new calls are refused and what is in flight is
answered; those who watch health are ended, and gRPC and HTTP stop; then schedulers and engines are closed.

    EncoderService ──▶ Catalog ──▶ ServedModel ──▶ TextTokenizer (threads)
                         ▲              └────────▶ Scheduler ──▶ Engine (threads of its own)
                         └─ ModelManager ◀── the model repository
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from encserve_server.callers.registry import Callers, open_source
from encserve_server.calls import Calls
from encserve_server.errors import StartupError
from encserve_server.ledger import Places
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import ServedModel
from encserve_server.models.turns import TurnPool
from encserve_server.open_inference.service import OpenInference
from encserve_server.repository.activation import serve_model
from encserve_server.repository.loaded import LoadedModel
from encserve_server.repository.loading import load_model
from encserve_server.repository.manager import Loader, ModelManager
from encserve_server.rpc import health, reflection, service
from encserve_server.rpc.connections import Connections
from encserve_server.rpc.guard import RpcGuard
from encserve_server.rpc.open_inference import service as open_inference
from encserve_server.rpc.sending import Sending
from encserve_server.rpc.server import add_service, listen, make_server
from encserve_server.settings import MIB, Settings
from encserve_server.system import memory
from encserve_server.system.background import repeat
from encserve_server.system.certificates import CertificateError, Certificates, TlsFiles
from encserve_server.system.clock import Clock, MonotonicClock
from encserve_server.system.cpus import lower_thread_priority
from encserve_server.system.listeners import is_loopback
from encserve_server.telemetry.call_log import RefusalLog, open_access_log
from encserve_server.telemetry.gpus import watch_gpus
from encserve_server.telemetry.lag import LoopWatch
from encserve_server.telemetry.lines import LineWriter
from encserve_server.telemetry.metrics import CallerMetrics, Metrics
from encserve_server.telemetry.page import MetricsPage
from encserve_server.telemetry.spans import Tracer

if TYPE_CHECKING:
    from encserve_server.http.server import HttpServer

logger = logging.getLogger(__name__)

_ENCODE_THREADS = 2
# When calls have given back so much of what they held, memory is returned to the system; looked at so often.
_MUCH_HELD_BYTES = 64 * MIB
_HELD_LOOK_SECONDS = 1.0
# How long new calls are refused before gRPC stops.
_REFUSING_SECONDS = 0.5
# How long gRPC then waits for what is not ours.
_FAREWELL_SECONDS = 1.0


class App:
    """A whole server, to be started and stopped once, on one event loop."""

    def __init__(self, settings: Settings, load: Loader = load_model) -> None:
        """Builds what needs no model; `load` turns a bundle's directory into a model, in a thread."""
        self.settings = settings
        self.grpc_port = 0  # the real ports, once started
        self.metrics_port = 0
        self.http_port: int | None = None
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.metrics = Metrics(self.registry)
        self.catalog = Catalog(settings.aliases, accept_any_name=settings.accept_any_model_name)
        self._clock = MonotonicClock()
        self._tokenize_pool = TurnPool(settings.tokenizer_threads, "encserve-tokenize")
        # Loading is in no hurry, and the threads that engines make are made here.
        self._load_pool = ThreadPoolExecutor(1, thread_name_prefix="encserve-load", initializer=lower_thread_priority)
        self._encode_pool = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="encserve-encode")
        # Inspections wait for their callers to read, so they have a thread of their own.
        self._inspect_pool = ThreadPoolExecutor(1, thread_name_prefix="encserve-chunks")
        max_held_bytes = settings.in_flight_bytes_for(memory.usable_bytes())
        self._calls = Calls(self.catalog, self._clock, self._encode_pool, max_held_bytes=max_held_bytes)
        self._calls.answer_times = self.metrics.answer_times
        self._most_held_bytes = 0  # since memory was last given back
        self._sending = Sending(self._clock)
        self._places = Places(self._calls.budget, self._clock, self._calls.draining, settings.max_request_mib * MIB)
        self._connections = Connections(settings.max_connections, lambda: self.grpc_port, self._clock)
        self._guard = RpcGuard(self._calls, self.metrics, self._places, self._sending, self._connections)
        self.metrics.in_flight.set_function(lambda: self._calls.in_flight)  # read when the page is, which costs no call
        self.metrics.in_flight_bytes.set_function(lambda: self._calls.budget.held)
        self.metrics.in_flight_limit_bytes.set(max_held_bytes)
        self._health_service = health.HealthService()
        self._health = health.ModelHealth(
            self._health_service,
            service.SERVICE_NAME,
            self.metrics,
            (open_inference.SERVICE_NAME,) * settings.open_inference,
        )
        self._service = service.EncoderService(
            self._calls, inspect_pool=self._inspect_pool, max_stream_in_flight=settings.max_stream_in_flight
        )
        self._inference = OpenInference(self._calls)
        self._open_inference = open_inference.OpenInferenceService(
            self._calls, self._inference, max_stream_in_flight=settings.max_stream_in_flight
        )
        self.manager = ModelManager(
            settings,
            self.catalog,
            self.metrics,
            clock=self._clock,
            load=load,
            serve=self._serve_model,
            on_models_change=self._health.watch,
            load_pool=self._load_pool,
            tokenize_pool=self._tokenize_pool,
        )
        self._certificates: Certificates | None = None
        self._tracer: Tracer | None = None
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._metrics_page: MetricsPage | None = None
        self._loop_watch = LoopWatch(self._clock, self.metrics.event_loop_lag_seconds.observe)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every model answers; from then on the model repository is followed.

        Raises:
            StartupError: A port is taken, a bundle, the device, a TLS file or the file of callers is not usable, or
                tracing cannot be had.
        """
        logger.info("settings in force", extra={"settings": self.settings.in_force()})
        self._certificates = _open_certificates(self.settings, self.metrics)
        self._tracer = self._calls.tracer = _open_tracer(self.settings, self._clock, self.metrics)
        self._open_callers()
        await self._start_metrics()
        await self._start_grpc()
        await self._start_http()
        await self.manager.start()
        logger.info(
            "serving",
            extra={
                "grpc_port": self.grpc_port,
                "metrics_port": self.metrics_port,
                "http_port": self.http_port,
                "models": ["@".join(model.key) for model in self.catalog.all()],
            },
        )

    async def stop(self) -> bool:
        """Drains and stops. Returns whether everything ended; an engine that is stuck does not."""
        await self.manager.stop()
        await self._health.shut_down()
        if self.catalog.all():  # a server that never served has nobody who must notice
            await asyncio.sleep(self.settings.drain_delay_seconds)
        if self._server is not None:
            await self._drain(self._server)
        clean = await self.manager.close()
        self._tokenize_pool.close()
        for pool in (self._load_pool, self._encode_pool, self._inspect_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        for task in self._tasks:
            task.cancel()
        if self._tracer is not None:
            await self._tracer.close()
        if self._metrics_page is not None:
            self._metrics_page.close()
        if self._calls.refusals is not None:
            self._calls.refusals.close()
        if self._calls.access_log is not None:
            self._calls.access_log.close()
        logger.info("stopped", extra={"clean": clean})
        return clean

    async def _drain(self, server: grpc.aio.Server) -> None:
        """Refuses new calls, lets those in flight finish, and stops gRPC.

        grpcio's own stop answers calls that it has read but not begun with CANCELLED. So whoever has an answer is first
        refused by us, with UNAVAILABLE, for long enough to have gone elsewhere with the next call.
        """
        self._calls.drain()
        grace_ends = self._clock.now() + self.settings.grace_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.grace_seconds):
                await self._calls.idle.wait()
                if self.catalog.all():
                    await asyncio.sleep(_REFUSING_SECONDS)
        self._health_service.end()
        # Nothing of ours is left, or its time is up: what is open now are health checks, and who looks at reflection.
        farewell_seconds = min(max(grace_ends - self._clock.now(), 0), _FAREWELL_SECONDS)
        closing = [] if self._http is None else [self._http.close(farewell_seconds)]
        await asyncio.gather(server.stop(farewell_seconds), *closing)

    def _open_callers(self) -> None:
        """Reads who may call, and opens what is written of calls."""
        settings, calls = self.settings, self._calls
        calls.refusals = RefusalLog()
        if settings.access_log:
            calls.access_log = open_access_log()
            calls.access_log.on_lost = self.metrics.log_lines_lost.labels("access").inc
        source = open_source(settings.api_key, settings.api_key_file, settings.callers)
        if source is None and settings.tls_client_ca_file is None and not is_loopback(settings.host):
            logger.warning(
                "EVERYBODY WHO REACHES THIS ADDRESS MAY CALL: there are no keys; set ENCSERVE_API_KEY, --api-key-file "
                "or --callers, or --tls-client-ca-file for client certificates",
                extra={"host": settings.host},
            )
        if source is None and not settings.trust_fairness_id:
            return
        observer = calls.caller_observer = CallerMetrics(self.metrics)
        calls.callers = Callers(
            source,
            self._clock,
            public_listing=settings.public_listing,
            trusts_proxy=settings.trust_fairness_id,
            asks_for_certificates=settings.tls_client_ca_file is not None,
            on_read=self.metrics.callers_read,
            on_change=observer.only,
        )
        self._tasks.append(asyncio.get_running_loop().create_task(calls.callers.watch(), name="encserve-callers"))

    async def _start_metrics(self) -> None:
        settings = self.settings
        try:
            self._metrics_page = MetricsPage(
                settings.host, settings.metrics_port, self.registry, self._is_healthy, self._certificates
            )
        except OSError as error:
            raise StartupError(
                f"--metrics-port {settings.metrics_port} on {settings.host}: {error.strerror}"
            ) from error
        self.metrics_port = self._metrics_page.port
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._loop_watch.run(), name="encserve-lag"))
        await loop.run_in_executor(self._load_pool, watch_gpus, self.metrics)

    async def _start_grpc(self) -> None:
        settings = self.settings
        server = make_server(settings)
        names = [health.SERVICE_NAME]
        add_service(server, health.SERVICE_NAME, health.METHODS, self._health_service.handlers(self._guard))
        protocols = [(service, self._service)] + [(open_inference, self._open_inference)] * settings.open_inference
        for protocol, servicer in protocols:
            add_service(server, protocol.SERVICE_NAME, protocol.METHODS, servicer.handlers(self._guard))
            names.append(protocol.SERVICE_NAME)
        if settings.reflection:
            reflection_handlers = reflection.handlers(names, self._guard)
            for name in reflection.SERVICE_NAMES:
                add_service(server, name, reflection.METHODS, reflection_handlers)
        try:
            self.grpc_port = listen(server, settings.host, settings.grpc_port, self._certificates)
        except (OSError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.errno else error
            raise StartupError(f"--grpc-port {settings.grpc_port} on {settings.host}: {why}") from error
        await server.start()
        self._server = server
        watches = [
            self._places.watch(),
            self._sending.watch(),
            self._connections.watch(),
            repeat(self._give_memory_back, _HELD_LOOK_SECONDS, clock=self._clock),
        ]
        if self._certificates is not None:
            watches.append(self._certificates.watch(self._clock))
        for watch in watches:
            self._tasks.append(asyncio.get_running_loop().create_task(watch))

    async def _start_http(self) -> None:
        settings = self.settings
        if settings.http_port is None:
            return
        open_http = _import_http()
        try:
            self._http = await open_http(
                settings,
                self._calls,
                self.metrics,
                self._is_serving,
                self.metrics_port,
                self._inference,
                self._certificates,
            )
        except OSError as error:
            raise StartupError(f"--http-port {settings.http_port} on {settings.host}: {error.strerror}") from error
        self.http_port = self._http.port

    async def _give_memory_back(self) -> None:
        """Return memory to the system if calls have released much of it. The C library would keep most of it."""
        held = self._calls.budget.held
        self._most_held_bytes = max(self._most_held_bytes, held)
        if self._most_held_bytes - held >= _MUCH_HELD_BYTES:
            self._most_held_bytes = held
            await asyncio.get_running_loop().run_in_executor(self._load_pool, memory.trim)

    def _is_serving(self) -> bool:
        """Whether every model is ready, and the server is not stopping; any thread may ask."""
        return self._health_service.serving[""]

    def _is_healthy(self) -> bool:
        """Whether every model is ready, and the event loop alive; any thread may ask."""
        return self._loop_watch.is_alive() and self._is_serving()

    def _serve_model(self, loaded: LoadedModel) -> ServedModel:
        return serve_model(
            loaded,
            self.settings,
            self.metrics,
            clock=self._clock,
            on_health_change=self._health.changed,
            tracer=self._tracer,
        )


async def serve(settings: Settings, log: LineWriter[str]) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: The settings.
        log: The server's own log, whose lost lines are counted.

    Returns:
        The exit status: 0 if the server started and everything ended in time.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    app = App(settings)
    log.on_lost = app.metrics.log_lines_lost.labels("server").inc
    loop.add_signal_handler(signal.SIGHUP, app.manager.look_now)
    starting = loop.create_task(app.start())
    stopping = loop.create_task(stop.wait())
    # A signal while a model loads must not wait for the load.
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    failed = _report_start(starting)
    if not failed:
        await stopping
        logger.info("stopping", extra={"grace_seconds": settings.grace_seconds})
    starting.cancel()
    stopping.cancel()
    return 0 if await app.stop() and not failed else 1


def _report_start(starting: "asyncio.Task[None]") -> bool:
    """Says why the start failed, if it did."""
    error = starting.exception() if starting.done() else None
    if isinstance(error, StartupError):
        logger.error("cannot start: %s", error)
    elif error is not None:
        logger.error("cannot start: unexpected error", exc_info=error)
    return error is not None


def _import_http() -> "Callable[..., Awaitable[HttpServer]]":
    """What serves HTTP.

    Raises:
        StartupError: It is not installed.
    """
    try:
        from encserve_server.http.server import open_http
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("aiohttp", "msgspec", "orjson"):
            raise
        raise StartupError(
            f"--http-port: the Python package {error.name} is not installed; install encserve-server[http]"
        ) from error
    return open_http


def _open_certificates(settings: Settings, metrics: Metrics) -> Certificates | None:
    """The TLS files, or None where the server speaks plaintext; the log says so where other machines reach it.

    Raises:
        StartupError: A file cannot be used, or the extra is not installed.
    """
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        if not is_loopback(settings.host):
            logger.warning(
                "NOT ENCRYPTED: other machines reach --host %s, and whoever is on the way reads and changes every "
                "request; give --tls-cert-file and --tls-key-file, or let a proxy on this machine do TLS",
                settings.host,
            )
        return None
    try:
        return Certificates(
            TlsFiles(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file), metrics
        )
    except CertificateError as error:
        raise StartupError(str(error)) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise StartupError(
            f"tls_cert_file: the Python package {error.name} is not installed; install encserve-server[tls]"
        ) from error


def _open_tracer(settings: Settings, clock: Clock, metrics: Metrics) -> Tracer | None:
    """What traces, or None where nobody asked for it.

    Raises:
        StartupError: OpenTelemetry is not installed, or its own settings are wrong.
    """
    if not settings.trace_endpoint:
        return None
    try:
        from encserve_server.telemetry.tracing import open_otlp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise StartupError(
            "--trace-endpoint: the Python package opentelemetry is not installed, or not all of it; install "
            "encserve-server[tracing]"
        ) from error
    return open_otlp(settings.trace_endpoint, settings.trace_sample_ratio, clock, metrics)
