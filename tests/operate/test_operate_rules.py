"""Prometheus' configuration, rules and alerts, as promtool sees them, and what people need of them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import ALERTS, DASHBOARDS, ROOT, RULES, metric_names, panels, queries
from prometheus import promtool

from encserve_server.error_table import ERROR_TABLE
from encserve_server.telemetry.metrics import SECONDS_BUCKETS

PROMETHEUS = ROOT / "deploy/prometheus"
TESTS = sorted(PROMETHEUS.glob("tests/*.yml"))
OPERATIONS = (ROOT / "docs/operations.md").read_text()


@pytest.mark.system
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    checked = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout
    assert "duplicate" not in checked.stdout + checked.stderr


@pytest.mark.system
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_every_alert_fires_where_it_should_and_nowhere_else(path: Path) -> None:
    tested = promtool("test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.system
def test_a_rule_that_is_wrong_fails_its_test(tmp_path: Path) -> None:
    """The tests above can fail: here a queue counts as nearly full only when it is."""
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    alerts = tmp_path / "rules/alerts.yml"
    assert alerts.read_text().count("> 0.8\n") == 1
    alerts.write_text(alerts.read_text().replace("> 0.8\n", "> 0.95\n"))
    tested = promtool("test", "rules", str(tmp_path / "tests/saturation.yml"))
    assert tested.returncode != 0
    assert "EncserveQueueSaturated" in tested.stdout + tested.stderr


def test_each_alert_is_tested_both_ways() -> None:
    fires, quiet = set(), set()
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for check in test["promql_expr_test"]:
                (name,) = re.findall(r'alertname="(\w+)"', check["expr"])
                if check["exp_samples"]:
                    assert 'alertstate="firing"' in check["expr"], "pending is not firing"
                    fires.add(name)
                else:
                    quiet.add(name)
    assert fires == quiet == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    """Its link leads to a section that says what it means, how to confirm it and what to do."""
    name = alert["alert"]
    assert name.startswith("Encserve")
    assert alert["labels"]["severity"] in ("critical", "warning")
    annotations = alert["annotations"]
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
    assert annotations["runbook_url"].endswith(f"docs/operations.md#{name.lower()}")
    section = OPERATIONS.partition("\n## Alerts\n")[2].partition("\n## ")[0].partition(f"\n### {name}\n")[2]
    text = section.partition("\n### ")[0]
    for part in ("**Means.**", "**Confirm.**", "**Do.**"):
        assert part in text, f"{name} has no {part}"


def test_no_section_is_left_of_an_alert_that_is_gone() -> None:
    section = OPERATIONS.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


def test_rules_and_dashboards_have_the_same_objectives() -> None:
    in_rules = " ".join(rule["expr"] for rule in RULES)
    in_panels = " ".join(expr for _, expr in queries())
    failed_codes = set(re.findall(r'grpc_code=~"([^"]+)"', in_panels))
    assert len(failed_codes) == 1
    assert failed_codes <= set(re.findall(r'grpc_code=~"([^"]+)"', in_rules))
    bounds = {float(bound) for bound in re.findall(r'le="([\d.]+)"', in_rules)}
    assert {float(bound) for bound in re.findall(r'le="([\d.]+)"', in_panels)} <= bounds
    answer_panels = [
        panel
        for board in DASHBOARDS.values()
        for panel in panels(board)
        if panel["fieldConfig"]["defaults"]["unit"] == "s" and "encserve_answer_seconds" in panel["targets"][0]["expr"]
    ]
    lines = {
        step["value"] for panel in answer_panels for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    }
    assert lines - {None} == bounds
    assert bounds <= set(SECONDS_BUCKETS), "no bucket ends there, so nothing would be counted"


def test_refusals_are_the_callers_doing_or_the_servers() -> None:
    """A new reason of RESOURCE_EXHAUSTED has to be one or the other, and the alert of refused callers has the rest."""
    (failed,) = [rule["expr"] for rule in RULES if rule.get("record") == "instance:encserve_calls_failed:total"]
    (refused,) = [alert["expr"] for alert in ALERTS if alert["alert"] == "EncserveCallersRefused"]
    servers = set(re.findall(r'reason=~"([A-Z_|]+)"', failed)[0].split("|"))
    callers = set(re.findall(r'outcome=~"([A-Z_|]+)"', refused)[0].split("|"))
    of = {
        code: {error.reason for error, status in ERROR_TABLE.items() if status.grpc == code}
        for code in ("RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
    }
    assert servers <= of["RESOURCE_EXHAUSTED"]
    assert set().union(*of.values()) - servers == callers


def test_bulk_adds_no_servers() -> None:
    """The autoscaler's query leaves bulk out, in Prometheus' adapter and for KEDA."""
    adapter = yaml.safe_load((ROOT / "deploy/kubernetes/prometheus-adapter.yaml").read_text())
    query = adapter["rules"]["external"][0]["metricsQuery"]
    assert "- avg_over_time(encserve_queue_bulk_tokens[1m])" in query
    assert f"    {query}\n" in OPERATIONS


def test_every_rule_reads_something() -> None:
    for rule in RULES:
        if not rule["expr"].startswith("vector("):
            assert metric_names(rule["expr"]), rule["expr"]
