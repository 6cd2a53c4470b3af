"""Tests of metrics: their values, their labels, and the page that Prometheus reads."""

import asyncio
import math
import sys
import types
import urllib.request

import pytest
from fake_clock import FakeClock
from fake_engine import FakeEngine
from fake_server import D_MODEL, FakeServer, StartServer, refusal
from prometheus import promtool
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.failures import REASONS
from encserve_server.protocols.encserve.service import SERVICE_NAME
from encserve_server.telemetry.gpus import watch_gpus
from encserve_server.telemetry.lag import STANDSTILL_SECONDS, LoopWatch
from encserve_server.telemetry.metrics import Metrics

MODEL = {"model": "tiny", "version": "2"}
METHODS = pb.DESCRIPTOR.services_by_name["EncoderService"]


def page(server: FakeServer, accept: str = "text/plain") -> str:
    url = f"http://127.0.0.1:{server.app.metrics_port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith(accept)
        text: str = answer.read().decode()
    return text


async def test_the_queue_counts_requests_and_sequences(server: FakeServer) -> None:
    first = await server.start_held(server.encode([1]))
    waiting = [asyncio.create_task(server.encode([1], [2], [3])) for _ in range(2)]
    await until(lambda: server.queued("sequences") == 6)
    assert server.queued("requests") == 2
    waiting[0].cancel()
    await until(lambda: server.queued("sequences") == 3)
    assert server.queued("requests") == 1
    server.engine.let_go()
    await asyncio.gather(first, waiting[1])
    assert server.queued("requests") == 0


async def test_every_limit_has_a_metric(start_server: StartServer) -> None:
    server = await start_server(max_inspections=3, max_queue_text_mib=5, max_queue_tokens=1000, max_in_flight_mib=100)
    assert server.sample("encserve_inspections_limit", **MODEL) == 3
    assert server.sample("encserve_queue_limit_text_bytes", **MODEL) == 5 * 2**20
    assert server.sample("encserve_queue_limit_tokens", **MODEL) == 1000
    assert server.sample("encserve_in_flight_limit_bytes") == 100 * 2**20
    assert server.queued("text_bytes") == server.sample("encserve_in_flight_bytes") == 0


def test_busy_seconds_add_up() -> None:
    """The metric is the sum of busy times. The scheduler's tests check that parallel runs count once."""
    registry = CollectorRegistry()
    model = Metrics(registry).for_model("tiny", "2")
    for seconds in (2.0, 3.0):
        model.was_busy(seconds)
    assert registry.get_sample_value("encserve_device_busy_seconds_total", MODEL) == 5


async def test_failed_runs_count_as_busy_time(start_server: StartServer) -> None:
    server = await start_server(FakeEngine(D_MODEL, poison=666))
    await refusal(server.encode([666]))
    assert server.sample("encserve_failed_batches_total", **MODEL) == 1
    assert server.sample("encserve_device_busy_seconds_total", **MODEL) > 0


async def test_a_blocked_event_loop_counts_every_missed_tick() -> None:
    clock = FakeClock()
    lags: list[float] = []
    task = asyncio.create_task(LoopWatch(clock, lags.append).run())
    await asyncio.sleep(0)
    clock.advance(0.1)
    await asyncio.sleep(0)
    assert lags == pytest.approx([0])
    await asyncio.sleep(0)
    clock.advance(0.45)
    await asyncio.sleep(0)
    assert lags[1:] == pytest.approx([0.35, 0.25, 0.15, 0.05])
    task.cancel()


async def test_an_event_loop_without_ticks_is_not_alive() -> None:
    clock = FakeClock()
    watch = LoopWatch(clock, lambda _: None)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    clock.advance(STANDSTILL_SECONDS - 0.01)
    assert watch.is_alive()
    clock.advance(0.02)
    assert not watch.is_alive()
    await asyncio.sleep(0)
    assert watch.is_alive()
    task.cancel()


def test_an_unloaded_version_leaves_the_page() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    models = {version: metrics.for_model("tiny", version) for version in ("1", "2")}
    for model in models.values():
        model.describe(
            fingerprint="f", precision="float32", provider="P", device="cpu", requested_device="auto", runtime="r"
        )

    def names(version: str) -> set[str]:
        samples = [sample for family in registry.collect() for sample in family.samples]
        return {sample.name for sample in samples if sample.labels.get("version") == version}

    assert names("1") == names("2")
    before = names("2")
    metrics.forget_model("tiny", "1")
    assert names("1") == set()
    assert names("2") == before
    models["1"].batch_failed()  # a batch of version 1 fails after the version was unloaded
    metrics.forget_model("tiny", "1")
    assert names("1") == set()
    assert registry.get_sample_value("encserve_model_loads_total", {"model": "tiny", "outcome": "refused"}) == 0


def test_a_new_model_has_every_series_at_0() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.for_model("tiny", "2")
    for family in registry.collect():
        labels = next(m for m in vars(metrics).values() if getattr(m, "_name", "") == family.name)._labelnames
        if "version" in labels and family.name not in ("encserve_model_info", "encserve_build_info"):
            assert family.samples, family.name
            assert all(sample.value == 0 for sample in family.samples), family.name


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
async def test_the_page_in_both_formats(shared: FakeServer, accept: str) -> None:
    await shared.encode("hello")
    text = await asyncio.to_thread(page, shared, accept)
    assert 'encserve_tokens_total{model="tiny",version="2"}' in text
    if accept != "text/plain":
        assert list(parse_openmetrics(text))  # type: ignore[no-untyped-call]
        assert text.endswith("# EOF\n")


async def test_a_failed_page_is_one_error_in_the_log(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.app.metrics.in_flight.set_function(lambda: 1 / 0)
    with pytest.raises(OSError, match="closed connection"):
        await asyncio.to_thread(page, server)
    server.app.metrics.in_flight.set_function(lambda: 0)
    assert await asyncio.to_thread(page, server)
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.exc_info
    assert isinstance(error.exc_info[1], ZeroDivisionError)


async def test_callers_cannot_add_labels(shared: FakeServer) -> None:
    """Calls with unknown models, versions and methods add no series to the page."""
    await shared.encode([1])

    def series() -> set[str]:
        return {line.rpartition(" ")[0] for line in page(shared).splitlines() if line.startswith(("encserve", "grpc"))}

    before = await asyncio.to_thread(series)
    for method, request in (
        ("Encode", b"\x0a\x04evil"),
        ("Evil", b""),
        ("GetModel", b"\x0a\x04evil"),
        ("Encode", b"\xff"),
    ):
        await refusal(shared.call(method, request))
    assert await asyncio.to_thread(series) == before


def test_a_page_of_three_models_stays_small() -> None:
    """Writing the page takes about 8 µs per line, and blocks all other Python code. So the page must have few lines."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.zero([("unary", SERVICE_NAME, name) for name in METHODS.methods_by_name], map(str, range(17)), REASONS)
    for version in ("1", "2", "3"):
        metrics.for_model("tiny", version)
    assert len(generate_latest(registry).splitlines()) < 1200


@pytest.mark.system
async def test_promtool_accepts_the_page(shared: FakeServer) -> None:
    await shared.encode("hello")
    checked = promtool("check", "metrics", stdin=await asyncio.to_thread(page, shared))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    bad = promtool("check", "metrics", stdin="# TYPE lat_ms counter\nlat_ms 1\n")
    assert bad.returncode != 0


class FakeNvml(types.ModuleType):
    """A fake module `pynvml` with two GPUs. The driver can be missing, and the second GPU can be lost."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.driver = True
        self.lost = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:  # noqa: N802
        if self.lost and handle == 1:
            raise self.NVMLError("GPU is lost")
        return types.SimpleNamespace(total=1000 + handle, used=10 + handle)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gpu_memory(nvml: FakeNvml) -> None:
    registry = CollectorRegistry()
    watch_gpus(Metrics(registry))
    assert registry.get_sample_value("encserve_gpu_memory_total_bytes", {"gpu": "1"}) == 1001
    assert registry.get_sample_value("encserve_gpu_memory_used_bytes", {"gpu": "0"}) == 10
    nvml.lost = True
    lost = registry.get_sample_value("encserve_gpu_memory_used_bytes", {"gpu": "1"})
    assert lost is not None
    assert math.isnan(lost)
    assert registry.get_sample_value("encserve_gpu_memory_used_bytes", {"gpu": "0"}) == 10


@pytest.mark.parametrize("missing", ["driver", "package"])
def test_no_gpu_memory_without_a_driver_or_its_package(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "driver":
        nvml.driver = False
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    registry = CollectorRegistry()
    watch_gpus(Metrics(registry))
    samples = [sample for family in registry.collect() for sample in family.samples if "gpu" in family.name]
    assert samples == []
