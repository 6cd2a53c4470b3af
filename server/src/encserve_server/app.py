"""Builds the whole server, starts it and stops it.

Start: First the metrics page, gRPC, and HTTP if it has a port. Until the models are ready, health reports NOT_SERVING.
A caller of `App.start` may prepare bundles now, such as download and export them. Then a thread verifies, loads and
warms up each model. After that, health reports SERVING, and the manager watches the model repository.

Stop: Health reports NOT_SERVING. After a delay for load balancers, new calls are refused and open calls are answered.
Then health watches end, and gRPC and HTTP stop. Last, schedulers and engines are closed.

    EncoderService ──▶ Catalog ──▶ ServedModel ──▶ TextTokenizer (threads)
                         ▲              └────────▶ Scheduler ──▶ Engine (own threads)
                         └─ ModelManager ◀── the model repository
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from encserve.extras import needs
from encserve_server.callers.registry import Callers, open_source
from encserve_server.calls import Calls
from encserve_server.endpoints.host import Host
from encserve_server.errors import StartupError
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import ServedModel
from encserve_server.models.turns import FairThreadPool
from encserve_server.protocols import over_grpc
from encserve_server.repository.activation import serve_model
from encserve_server.repository.loaded import LoadedModel
from encserve_server.repository.loading import load_model
from encserve_server.repository.manager import Loader, ModelManager
from encserve_server.settings import MIB, Settings
from encserve_server.system import memory
from encserve_server.system.background import repeat
from encserve_server.system.certificates import Certificates, TlsFiles
from encserve_server.system.clock import Clock, MonotonicClock
from encserve_server.system.cpus import lower_thread_priority
from encserve_server.system.files import FileError
from encserve_server.system.listeners import is_loopback
from encserve_server.telemetry.call_log import RefusalLog, open_access_log
from encserve_server.telemetry.gpus import watch_gpus
from encserve_server.telemetry.lag import LoopWatch
from encserve_server.telemetry.lines import LineWriter
from encserve_server.telemetry.metrics import CallerMetrics, Metrics
from encserve_server.telemetry.page import MetricsPage
from encserve_server.telemetry.spans import Tracer
from encserve_server.transport.grpc import health, reflection
from encserve_server.transport.grpc.connections import Connections
from encserve_server.transport.grpc.guard import RpcGuard
from encserve_server.transport.grpc.server import add_service, listen, make_server

if TYPE_CHECKING:
    from encserve_server.transport.http.server import HttpServer

logger = logging.getLogger(__name__)

_ENCODE_THREADS = 2
# The interval of the log lines while models are prepared.
_PREPARING_SECONDS = 10.0
# How long the preparation of models may take to end after SIGTERM.
_STOP_PREPARING_SECONDS = 5.0
# The interval at which freed memory goes back to the system. Returning 1 MiB takes about 0.1 ms.
_TRIM_SECONDS = 5.0
# How long the server refuses new calls before gRPC stops.
_REFUSING_SECONDS = 0.5
# How long gRPC waits after that for health checks and reflection.
_STOP_SECONDS = 1.0


# Prepares the bundles in the model repository, and passes each stage, as "downloading 61 of 90 MB", to its argument.
# Any thread may call the argument. If the bundles cannot be prepared, it raises StartupError.
Prepare = Callable[[Callable[[str], None]], Awaitable[None]]


class App:
    """A whole server. It can be started and stopped once, on one event loop."""

    def __init__(self, settings: Settings, load: Loader = load_model) -> None:
        """Build the parts that need no model. `load` loads a model from a bundle's directory, and runs in a thread."""
        self.settings = settings
        self.grpc_port = 0  # set by `start`, like `metrics_port` and `http_port`
        self.metrics_port = 0
        self.http_port: int | None = None
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.metrics = Metrics(self.registry)
        self.catalog = Catalog(settings.aliases, accept_any_name=settings.accept_any_model_name)
        self._clock = MonotonicClock()
        self._tokenize_pool = FairThreadPool(settings.tokenizer_threads, "encserve-tokenize")
        # Loading is not urgent, so this thread has a low priority. Engines create their threads in this thread, so the
        # engines' threads have a low priority too.
        self._load_pool = ThreadPoolExecutor(1, thread_name_prefix="encserve-load", initializer=lower_thread_priority)
        self._encode_pool = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="encserve-encode")
        # A separate thread encodes the replies of inspections, because encoding may wait until a caller reads.
        self._inspect_pool = ThreadPoolExecutor(1, thread_name_prefix="encserve-chunks")
        max_held_bytes = settings.in_flight_bytes_for(memory.usable_bytes())
        self._calls = Calls(
            self.catalog,
            self._clock,
            self._encode_pool,
            max_held_bytes=max_held_bytes,
            max_request_bytes=settings.max_request_mib * MIB,
        )
        self._calls.answer_times = self.metrics.answer_times
        self._connections = Connections(settings.max_connections, lambda: self.grpc_port, self._clock)
        self._guard = RpcGuard(
            self._calls,
            self.metrics,
            self._connections,
            max_stream_in_flight=settings.max_stream_in_flight,
        )
        self.metrics.in_flight.set_function(lambda: self._calls.in_flight)  # called only when /metrics is read
        self.metrics.in_flight_bytes.set_function(lambda: self._calls.budget.held)
        self.metrics.in_flight_limit_bytes.set(max_held_bytes)
        self._host = Host(self._calls, settings, self._is_serving, self._inspect_pool)
        self._services = over_grpc.services(self._host)
        self._health_service = health.HealthService()
        self._health = health.ModelHealth(self._health_service, [it.name for it in self._services], self.metrics)
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

    async def start(self, prepare: Prepare | None = None) -> None:
        """Start, and return when all models are ready. From then on, the model repository is watched.

        Args:
            prepare: Prepares the bundles while the ports are open and health reports NOT_SERVING.

        Raises:
            StartupError: A port is in use, tracing is not available, or a bundle, the device, a TLS file or the file of
                callers is not usable. Or `prepare` raised it.
        """
        logger.info("settings in force", extra={"settings": self.settings.in_force()})
        self._certificates = _open_certificates(self.settings, self.metrics)
        self._tracer = self._calls.tracer = _open_tracer(self.settings, self._clock, self.metrics)
        self._open_callers()
        await self._start_metrics()
        await self._start_grpc()
        await self._start_http()
        if prepare is not None:
            await self._prepare(prepare)
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

    async def _prepare(self, prepare: Prepare) -> None:
        """Prepare the bundles. Callers and health checks get the stage, and the log has a line every 10 s."""

        def log_stage() -> None:
            logger.info("preparing the models", extra={"stage": self.catalog.stage})

        logging_task = asyncio.create_task(repeat(log_stage, _PREPARING_SECONDS, clock=self._clock))
        try:
            await prepare(self.catalog.set_stage)
        finally:
            logging_task.cancel()
            self.catalog.set_stage("")

    async def stop(self) -> bool:
        """Drain and stop. Return False if something did not end, such as a stuck engine."""
        await self.manager.stop()
        await self._health.shut_down()
        if self.catalog.all():  # no load balancer sends calls to a server that never served
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
        """Refuse new calls, let open calls finish, and stop gRPC.

        When grpcio stops, it answers CANCELLED to calls that it has received but not started. To avoid this, the server
        first answers new calls with UNAVAILABLE for a while. Then callers send their next calls to another server.
        """
        self._calls.drain()
        grace_ends = self._clock.now() + self.settings.grace_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.grace_seconds):
                await self._calls.idle.wait()
                if self.catalog.all():
                    await asyncio.sleep(_REFUSING_SECONDS)
        self._health_service.end()
        # All calls have finished or run out of time. Only health checks and reflection are still open.
        stop_seconds = min(max(grace_ends - self._clock.now(), 0), _STOP_SECONDS)
        closing = [] if self._http is None else [self._http.close(stop_seconds)]
        await asyncio.gather(server.stop(stop_seconds), *closing)

    def _open_callers(self) -> None:
        """Read the keys and callers, and open the log of refused calls and the access log."""
        settings, calls = self.settings, self._calls
        calls.refusals = RefusalLog()
        if settings.access_log:
            calls.access_log = open_access_log()
            calls.access_log.on_lost = self.metrics.log_lines_lost.labels("access").inc
        source = open_source(settings.api_key, settings.api_key_file, settings.callers)
        if source is None and settings.tls_client_ca_file is None and not is_loopback(settings.host):
            logger.warning(
                "NO AUTHENTICATION: anyone who can reach this address may call; set ENCSERVE_API_KEY, --api-key-file, "
                "--callers, or --tls-client-ca-file for client certificates",
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
            on_change=observer.set_names,
        )
        self._tasks.append(asyncio.get_running_loop().create_task(calls.callers.watch(), name="encserve-callers"))

    async def _start_metrics(self) -> None:
        settings = self.settings
        try:
            self._metrics_page = MetricsPage(
                settings.host, settings.metrics_port, self.registry, self._is_healthy, self._certificates
            )
        except OSError as error:
            raise _port_error("metrics_port", settings, error) from error
        self.metrics_port = self._metrics_page.port
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._loop_watch.run(), name="encserve-lag"))
        await loop.run_in_executor(self._load_pool, watch_gpus, self.metrics)

    async def _start_grpc(self) -> None:
        settings = self.settings
        server = make_server(settings)
        add_service(server, health.SERVICE_NAME, health.METHODS, self._health_service.handlers(self._guard))
        for it in self._services:
            add_service(server, it.name, {rpc.name: rpc.kind for rpc in it.rpcs}, self._guard.handlers(it))
        if settings.reflection:
            names = [health.SERVICE_NAME, *(it.name for it in self._services)]
            reflection_handlers = reflection.handlers(names, self._guard)
            for name in reflection.SERVICE_NAMES:
                add_service(server, name, reflection.METHODS, reflection_handlers)
        try:
            self.grpc_port = listen(server, settings.host, settings.grpc_port, self._certificates)
        except (OSError, RuntimeError) as error:
            raise _port_error("grpc_port", settings, error) from error
        await server.start()
        self._server = server
        watches = [
            self._calls.places.watch(),
            self._connections.watch(),
            self._connections.watch_replies(),
            repeat(self._trim_memory, _TRIM_SECONDS, clock=self._clock),
        ]
        if self._certificates is not None:
            watches.append(self._certificates.watch(self._clock))
        for watch in watches:
            self._tasks.append(asyncio.get_running_loop().create_task(watch))

    async def _start_http(self) -> None:
        settings = self.settings
        if settings.http_port is None:
            return
        over_http, open_http = _import_http()
        try:
            self._http = await open_http(
                self._host,
                over_http.routes(self._host),
                self.metrics,
                elsewhere=over_http.DEFAULT_DIALECT,
                metrics_port=self.metrics_port,
                certificates=self._certificates,
            )
        except OSError as error:
            raise _port_error("http_port", settings, error) from error
        self.http_port = self._http.port

    async def _trim_memory(self) -> None:
        """Return the freed memory of ended calls, connections, streams and watches to the system."""
        await asyncio.get_running_loop().run_in_executor(self._load_pool, memory.trim)

    def _is_serving(self) -> bool:
        """Return whether all models are ready and the server is not stopping. Any thread may call this."""
        return self._health_service.serving[""]

    def _is_healthy(self) -> bool:
        """Return whether the server is serving and its event loop is alive. Any thread may call this."""
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


async def serve(
    settings: Settings,
    log: LineWriter[str],
    prepare: Prepare | None = None,
    on_serving: Callable[[App], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: The settings.
        log: The server log. Its lost lines are counted.
        prepare: See `App.start`. It is cancelled if a signal arrives first.
        on_serving: Called when the server serves.

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
    starting = loop.create_task(app.start(prepare))
    stopping = loop.create_task(stop.wait())
    # A signal must stop the server at once, even if a model is still loading.
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    failed = _report_start(starting)
    if not failed:
        if on_serving is not None and starting.done():
            on_serving(app)
        await stopping
        logger.info("stopping", extra={"grace_seconds": settings.grace_seconds})
    starting.cancel()
    stopping.cancel()
    await asyncio.wait((starting,), timeout=_STOP_PREPARING_SECONDS)
    return 0 if await app.stop() and not failed else 1


def _report_start(starting: "asyncio.Task[None]") -> bool:
    """Log the error if the start failed, and return whether it failed."""
    error = starting.exception() if starting.done() else None
    if isinstance(error, StartupError):
        logger.error("cannot start: %s", error)
    elif error is not None:
        logger.error("cannot start: unexpected error", exc_info=error)
    return error is not None


def _port_error(setting: str, settings: Settings, error: OSError | RuntimeError) -> StartupError:
    """Return the error for a port that cannot be opened. `setting` is the name of the port's setting."""
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number else error
    advice = "; stop the other program, or give another port" if number == errno.EADDRINUSE else ""
    flag = f"--{setting.replace('_', '-')}"
    return StartupError(f"{flag} {getattr(settings, setting)} on {settings.host}: {reason}{advice}")


def _import_http() -> "tuple[ModuleType, Callable[..., Awaitable[HttpServer]]]":
    """Return the module of the protocols over HTTP, and the function that starts the HTTP server.

    Raises:
        StartupError: A package that HTTP needs is not installed.
    """
    with needs("--http-port", "http", StartupError):
        from encserve_server.protocols import over_http
        from encserve_server.transport.http.server import open_http
    return over_http, open_http


def _open_certificates(settings: Settings, metrics: Metrics) -> Certificates | None:
    """Read the TLS files. Return None for plaintext, and log a warning if other machines can reach the server.

    Raises:
        StartupError: A file is not usable, or the extra `tls` is not installed.
    """
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        if not is_loopback(settings.host):
            logger.warning(
                "NOT ENCRYPTED: other machines can reach --host %s, and anyone on the network path can read and change "
                "requests; set --tls-cert-file and --tls-key-file, or use a TLS proxy on this machine",
                settings.host,
            )
        return None
    files = TlsFiles(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    try:
        with needs("--tls-cert-file", "tls", StartupError):
            return Certificates(files, metrics)
    except FileError as error:
        raise StartupError(str(error)) from error


def _open_tracer(settings: Settings, clock: Clock, metrics: Metrics) -> Tracer | None:
    """Open tracing. Return None if it is not configured.

    Raises:
        StartupError: OpenTelemetry is not installed, or its environment variables are wrong.
    """
    if not settings.trace_endpoint:
        return None
    with needs("--trace-endpoint", "tracing", StartupError):
        from encserve_server.telemetry.tracing import open_otlp
    return open_otlp(settings.trace_endpoint, settings.trace_sample_ratio, clock, metrics)
