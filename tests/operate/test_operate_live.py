"""Run a server under load, with Prometheus.

All queries of the Grafana dashboards, and all Prometheus rules, must have data.
"""

import asyncio
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

SERVICE = "/encserve.v1.EncoderService/"
# Prometheus needs time for a few scrapes. Prometheus also needs time to evaluate all rules twice, because some rules
# read the results of other rules.
WAIT_SECONDS = 40
# Values for Grafana's variables. A rate needs a window of several scrapes, so the interval is 5 s.
VARIABLES = {"$__rate_interval": "5s", "$model": ".+", "$instance": ".+"}
WITHOUT_DATA = "encserve_gpu_memory"  # without a GPU, this series does not exist
# The keys are series that do not exist in these tests. For each key, the tests look for its value instead, which is a
# series that exists in these tests.
SUBSTITUTES = {
    f'encserve_model_info{{requested_device="{device}", device!="cuda"}}': 'encserve_model_info{device!=""}'
    for device in ("cuda", "auto")
} | {"encserve_tls_certificate_expiry_timestamp_seconds": "encserve_tls_files_refused"}  # the key exists only with TLS
FROM_PROMETHEUS = {"up", "ALERTS", "scrape_duration_seconds"}
LOAD = [  # `Load` has made calls of each kind when all these series are above 0
    *(
        ("grpc_server_handled_total", {"grpc_method": method, "grpc_code": code})
        for method, codes in {
            "Encode": ("OK", "InvalidArgument", "ResourceExhausted"),
            "EncodeStream": ("OK", "Canceled", "DeadlineExceeded"),
            "Inspect": ("OK",),
        }.items()
        for code in codes
    ),
    ("encserve_refused_total", {"reason": "QUEUE_FULL"}),
    ("encserve_caller_calls_total", {"outcome": "SHARE_EXCEEDED"}),
    ("encserve_answer_seconds_count", {"priority": "bulk"}),
    *(("encserve_http_requests_total", {"status": status}) for status in ("200", "404")),
    *(("encserve_tokens_total", {"model": model}) for model in ("bert", "tiny-1", "tiny-2")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operate")
    export_small_with_text(folder / "models", "bert", folder / "checkpoint")
    for name in ("tiny-1", "tiny-2"):
        write_bundle(folder / "models", name)
    return folder / "models"


class Load:
    """A context manager that makes calls in another thread until the end of the `with` block.

    Some calls succeed. Other calls are invalid, exceed the queue, are cancelled, or miss their deadline.
    """

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
                invalid = pb.EncodeRequest(model="bert", inputs=[ids(1000)])
                large = pb.EncodeRequest(model="bert", inputs=[ids(*range(1, 61))] * 30)  # 8 requests exceed the queue
                bulk = pb.EncodeRequest(model="bert", inputs=large.inputs, priority=pb.PRIORITY_BULK)
                requests = [texts, invalid, *[bulk] * 3, *map(tiny, range(20)), *[large] * 8]
                stream: Any = channel.stream_stream(f"{SERVICE}EncodeStream")
                cancelled, late = stream(), stream(timeout=0.1)  # neither stream sends a message
                others = [self._stream(stream), self._inspect(channel), late.read()]
                others += [
                    http.post("/embed_all", json={"model": name, "inputs": "hello"}) for name in ("bert", "unknown")
                ]
                calls = [encode(request.SerializeToString()) for request in requests]
                await asyncio.gather(*calls, *others, return_exceptions=True)
                cancelled.cancel()
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
    """Yield a Prometheus that scrapes the server, while `Load` makes calls of all kinds."""
    committed, folder = ROOT / "deploy/prometheus/prometheus.yml", tmp_path_factory.mktemp("prometheus")
    target = f"127.0.0.1:{server.metrics_port}"
    with Load(server.target, server.url), running_prometheus(committed, folder, target, interval="500ms") as prometheus:
        ends = time.monotonic() + WAIT_SECONDS
        while missing := [series for series in LOAD if not server.metric(series[0], **series[1])]:
            assert time.monotonic() < ends, f"these series are still 0: {missing}"
            time.sleep(0.2)
        yield prometheus


def without_data(prometheus: Prometheus, expressions: Iterable[tuple[str, str]]) -> list[str]:
    """Wait up to WAIT_SECONDS until each expression has a value other than NaN.

    Return the expressions without such a value.
    """
    left = {where: expr for where, expr in expressions if WITHOUT_DATA not in expr}
    ends = time.monotonic() + WAIT_SECONDS
    while left and time.monotonic() < ends:
        left = {where: expr for where, expr in left.items() if all(map(math.isnan, prometheus.values(expr)))}
        time.sleep(0.5)
    return [f"{where}: {expr}" for where, expr in left.items()]


def with_variables(expr: str) -> str:
    """Replace Grafana's variables in an expression by values."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    return expr


def test_every_panel_has_data(prometheus: Prometheus) -> None:
    expressions = [(where, with_variables(expr)) for where, expr in queries()]
    assert len(expressions) > 90
    assert without_data(prometheus, expressions) == []


def test_every_rule_has_data(prometheus: Prometheus) -> None:
    """All recording rules have values, and all series in the expressions of alerts exist.

    Other tests check with promtool that the alerts fire.
    """
    recorded = [(name, name) for name in RECORDED]
    read = [
        (f"{alert['alert']} reads {selector}", SUBSTITUTES.get(selector, selector))
        for alert in ALERTS
        for selector in selectors(alert["expr"])
    ]
    assert without_data(prometheus, recorded + read) == []
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_templates_of_alerts_have_values(prometheus: Prometheus) -> None:
    """Alerts are soon pending, because the load violates the objectives.

    In the texts of the pending alerts, Prometheus has replaced all templates by values.
    """
    ends = time.monotonic() + WAIT_SECONDS
    while not (alerts := prometheus.get("alerts")["alerts"]):
        assert time.monotonic() < ends, "no alert is pending"
        time.sleep(0.5)
    for alert in alerts:
        text = " ".join(alert["annotations"].values())
        for fault in ("{{", "error expanding template", "no value"):
            assert fault not in text, text
        assert alert["annotations"]["runbook_url"].startswith("docs/reference/alerts.md#"), text


def test_every_metric_name_exists(server: RealServer, prometheus: Prometheus) -> None:
    """The server exports every metric that a query or a rule names, even in an operand of `or`.

    Each series that a recording rule writes is used in a query or a rule.
    """
    del prometheus  # the fixture has waited for the load
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    exported = {sample.name for family in families for sample in family.samples}
    for family in families:
        if not family.samples:
            exported.add(f"{family.name}_total" if family.type == "counter" else family.name)
    used = set().union(*(metric_names(expr) for _, expr in queries()), *(metric_names(rule["expr"]) for rule in RULES))
    assert used - exported - RECORDED - FROM_PROMETHEUS == set()
    assert used >= RECORDED
