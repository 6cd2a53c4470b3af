"""Every expression of every dashboard and rule, asked of a real Prometheus that scrapes a real server under load."""

import asyncio
import contextlib
import math
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from boards import ALERTS, RECORDED, ROOT, RULES, metric_names, queries, selectors
from checkpoints import export_small_with_text
from prometheus import Prometheus, need, running_prometheus
from prometheus_client.parser import text_string_to_metric_families
from real_server import RealServer, real_server
from tiny_bundle import write_bundle

from encserve_proto.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.system

SERVICE = "/encserve.v1.EncoderService/"
# How long everything may take to come up in Prometheus: a few scrapes, and two evaluations of rules that read rules.
PATIENCE_S = 40
# A window of several scrapes, as Grafana's $__rate_interval is.
VARIABLES = {"$__rate_interval": "5s", "$model": ".+", "$instance": ".+"}
# What has no data on a machine without a GPU.
WITHOUT_GPU = "encserve_gpu_memory"
# How calls end, by method.
CODES = {
    "Encode": ("OK", "InvalidArgument", "ResourceExhausted"),
    "EncodeStream": ("OK", "Canceled", "DeadlineExceeded"),
    "Inspect": ("OK",),
}
# What is there only while its alert fires; here it is enough that the labels exist.
CONDITIONS = {
    f'encserve_model_info{{requested_device="{asked}", device!="cuda"}}': 'encserve_model_info{device!=""}'
    for asked in ("cuda", "auto")
}
# What is there only with TLS.
CONDITIONS["encserve_tls_certificate_expiry_timestamp_seconds"] = "encserve_tls_files_refused"
# Made by Prometheus itself.
BUILT_IN = {"up", "ALERTS", "scrape_duration_seconds"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models: one that takes text and can be inspected, and two that are a few nodes."""
    folder = tmp_path_factory.mktemp("operate")
    export_small_with_text(folder / "models", "bert", folder / "checkpoint")
    for name in ("tiny-1", "tiny-2"):
        write_bundle(folder / "models", name)
    return folder / "models"


class Load:
    """Callers of every kind, in a thread of their own, until they are stopped: some right, some wrong, some gone."""

    def __init__(self, target: str, url: str) -> None:
        self._target = target
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    async def _run(self) -> None:
        http = httpx.AsyncClient(base_url=self._url, trust_env=False)
        async with http, grpc.aio.insecure_channel(self._target) as channel:
            encode: Any = channel.unary_unary(f"{SERVICE}Encode")
            while not self._over.is_set():
                texts = pb.EncodeRequest(model="bert", inputs=[pb.Input(text="hello brave new world")] * 3)
                wrong = pb.EncodeRequest(model="bert", inputs=[ids(1000)])
                many = pb.EncodeRequest(model="bert", inputs=[ids(*range(1, 61))] * 30)
                bulk = pb.EncodeRequest(model="bert", inputs=many.inputs, priority=pb.PRIORITY_BULK)  # two are a share
                calls = [
                    encode(it.SerializeToString())
                    for it in (texts, wrong, bulk, bulk, bulk, *(tiny(i) for i in range(20)))
                ]
                calls += [encode(many.SerializeToString()) for _ in range(8)]  # more than may wait
                stream: Any = channel.stream_stream(f"{SERVICE}EncodeStream")
                gone, late = stream(), stream(timeout=0.1)  # neither ever sends anything
                others = [self._stream(stream), self._inspect(channel), late.read()]
                others += [
                    http.post("/embed_all", json={"model": name, "inputs": "hello"}) for name in ("bert", "nobody")
                ]
                await asyncio.gather(*calls, *others, return_exceptions=True)
                gone.cancel()
                await asyncio.sleep(0.1)

    async def _stream(self, stream: Any) -> None:
        requests = [pb.EncodeStreamRequest(request_id=str(i), request=tiny(i)).SerializeToString() for i in range(3)]
        async for _ in stream(requests):
            pass

    async def _inspect(self, channel: grpc.aio.Channel) -> None:
        request = pb.InspectRequest(model="bert", input=pb.Input(text="hello"))
        inspect: Any = channel.unary_stream(f"{SERVICE}Inspect")
        async for _ in inspect(request.SerializeToString()):
            pass


def ids(*values: int) -> pb.Input:
    return pb.Input(token_ids=pb.TokenIds(ids=values))


def tiny(i: int) -> pb.EncodeRequest:
    return pb.EncodeRequest(model=f"tiny-{1 + i % 2}", inputs=[ids(*range(1, 2 + i))])


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RealServer]:
    need("prometheus")
    with real_server(models, "--http-port", "0", "--max-queue-tokens", "4000", "--trust-fairness-id") as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a server under load."""
    committed, folder = ROOT / "deploy/prometheus/prometheus.yml", tmp_path_factory.mktemp("prometheus")
    target = f"127.0.0.1:{server.metrics_port}"
    with Load(server.target, server.url), running_prometheus(committed, folder, target, interval="500ms") as prometheus:
        yield prometheus


def without_data(prometheus: Prometheus, expressions: Iterable[tuple[str, str]]) -> list[str]:
    """The places whose expressions give nothing but NaN, or nothing at all, however long one waits."""
    left = dict(expressions)
    ends = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < ends:
        for where, expr in list(left.items()):
            if not all(map(math.isnan, prometheus.values(expr))):
                del left[where]
        if all(WITHOUT_GPU in expr for expr in left.values()):
            break
        time.sleep(0.5)
    return [f"{where}: {expr}" for where, expr in left.items() if WITHOUT_GPU not in expr]


def filled_in(expr: str) -> str:
    """An expression as Grafana sends it."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    return expr


def test_the_load_is_of_every_kind(server: RealServer, prometheus: Prometheus) -> None:
    """Otherwise the tests below would ask for little."""
    del prometheus  # the load comes with it
    wanted = [
        *(("grpc_server_handled_total", {"grpc_method": it, "grpc_code": code}) for it in CODES for code in CODES[it]),
        ("encserve_refused_total", {"reason": "QUEUE_FULL"}),
        ("encserve_caller_calls_total", {"outcome": "SHARE_EXCEEDED"}),
        ("encserve_answer_seconds_count", {"priority": "bulk"}),
        *(("encserve_http_requests_total", {"status": it}) for it in ("200", "404")),
        *(("encserve_tokens_total", {"model": it}) for it in ("bert", "tiny-1", "tiny-2")),
    ]
    ends = time.monotonic() + PATIENCE_S
    while (missing := [it for it in wanted if not server.metric(it[0], **it[1])]) and time.monotonic() < ends:
        time.sleep(0.2)
    assert missing == []


def test_every_query_of_every_panel_gives_data(prometheus: Prometheus) -> None:
    asked = [(where, filled_in(expr)) for where, expr in queries()]
    assert len(asked) > 90
    assert without_data(prometheus, asked) == []


def test_every_rule_works_on_real_data(prometheus: Prometheus) -> None:
    """Every recording rule records; no alert fails to evaluate, and everything that one reads is there.

    Not that an alert fires: promtool's tests show that.
    """
    recorded = [(name, name) for name in RECORDED]
    read = [
        (f"{alert['alert']} reads {it}", CONDITIONS.get(it, it)) for alert in ALERTS for it in selectors(alert["expr"])
    ]
    assert without_data(prometheus, recorded + read) == []
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_what_an_alert_says_is_filled_in(prometheus: Prometheus) -> None:
    """The load breaks every objective, so the alerts of that are pending soon."""
    ends = time.monotonic() + PATIENCE_S
    while not (alerts := prometheus.get("alerts")["alerts"]) and time.monotonic() < ends:
        time.sleep(0.5)
    assert alerts, "nothing is even pending"
    for alert in alerts:
        said = " ".join(alert["annotations"].values())
        assert "{{" not in said, said
        assert "error expanding template" not in said, said
        assert "no value" not in said, said
        assert alert["annotations"]["runbook_url"].startswith("docs/operations.md#"), said


def test_every_metric_that_is_used_is_on_the_page(server: RealServer) -> None:
    """And no other: a name that was mistyped, or is gone, is found even where `or` hides it."""
    with contextlib.closing(urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics")) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    there = {sample.name for family in families for sample in family.samples}
    for family in families:
        if not family.samples:
            there.add(f"{family.name}_total" if family.type == "counter" else family.name)
    used = set().union(*(metric_names(expr) for _, expr in queries()), *(metric_names(rule["expr"]) for rule in RULES))
    assert used - there - RECORDED - BUILT_IN == set()
    assert used >= RECORDED, "a rule records what nobody reads"
