"""The benchmark of the metrics runs, and its page is that of a server with three models."""

import metrics_cost
import pytest
from click.testing import CliRunner
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families


def test_it_prints_every_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_cost, "_CALLS", 20)
    monkeypatch.setattr(metrics_cost, "_PAGES", 2)
    result = CliRunner().invoke(metrics_cost.main, catch_exceptions=False)
    assert result.exit_code == 0
    for name in ("a request", "a batch of 64", "a tick", "the page, 3 models, CPU time", "lines"):
        assert name in result.output


def test_its_page_has_what_a_server_has() -> None:
    registry, _, _ = metrics_cost.a_page()
    families = {it.name: it for it in text_string_to_metric_families(generate_latest(registry).decode())}
    assert len(families["encserve_model_info"].samples) == 3
    assert len(families["grpc_server_handled"].samples) == 5 * 17
    assert "process_resident_memory_bytes" in families
