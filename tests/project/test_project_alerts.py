"""Tests of the rules and alerts of Prometheus.

Each alert has a runbook in docs/reference/alerts.md and a promtool test in deploy/prometheus/tests. The tests also
check that the rules and the dashboards have the same objectives.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import ALERTS, DASHBOARDS, ROOT, RULES, panels, queries
from prometheus import promtool

from encserve_server.errors import CALLER_ERRORS
from encserve_server.telemetry.metrics import SECONDS_BUCKETS

PROMETHEUS = ROOT / "deploy/prometheus"
TESTS = sorted(PROMETHEUS.glob("tests/*.yml"))
RUNBOOKS = (ROOT / "docs/reference/alerts.md").read_text()


@pytest.mark.system
def test_promtool_accepts_the_configuration() -> None:
    checked = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout
    assert "duplicate" not in checked.stdout + checked.stderr


@pytest.mark.system
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_passes_the_tests_of_the_alerts(path: Path) -> None:
    tested = promtool("test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_firing_and_a_quiet_test() -> None:
    firing, quiet = set(), set()
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for check in test["promql_expr_test"]:
                (name,) = re.findall(r'alertname="(\w+)"', check["expr"])
                if check["exp_samples"]:
                    assert 'alertstate="firing"' in check["expr"], f"{path.name}: the test must check alertstate firing"
                    firing.add(name)
                else:
                    quiet.add(name)
    assert firing == quiet == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_a_runbook(alert: dict[str, Any]) -> None:
    name, annotations = alert["alert"], alert["annotations"]
    assert name.startswith("Encserve")
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
    assert annotations["runbook_url"].endswith(f"docs/reference/alerts.md#{name.lower()}")
    text = RUNBOOKS.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for part in ("**Means.**", "**Confirm.**", "**Do.**"):
        assert part in text, f"the runbook of {name} in docs/reference/alerts.md has no {part}"


def test_each_runbook_has_an_alert() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


def test_the_table_of_alerts() -> None:
    """The table in docs/reference/alerts.md has the severity and the summary of each alert."""
    rows = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (\w+) \| (.*) \|$", RUNBOOKS, re.MULTILINE)
    assert rows == [
        (it["alert"], it["alert"].lower(), it["labels"]["severity"], it["annotations"]["summary"]) for it in ALERTS
    ]


def test_rules_and_dashboards_have_the_same_objectives() -> None:
    in_rules = " ".join(rule["expr"] for rule in RULES)
    in_panels = " ".join(expr for _, expr in queries())
    failed_codes = set(re.findall(r'grpc_code=~"([^"]+)"', in_panels))
    assert len(failed_codes) == 1
    assert failed_codes <= set(re.findall(r'grpc_code=~"([^"]+)"', in_rules))
    bounds = {float(bound) for bound in re.findall(r'le="([\d.]+)"', in_rules)}
    assert {float(bound) for bound in re.findall(r'le="([\d.]+)"', in_panels)} <= bounds
    assert bounds <= set(SECONDS_BUCKETS), "the rules may use only bounds of SECONDS_BUCKETS"
    defaults = [
        panel["fieldConfig"]["defaults"]
        for board in DASHBOARDS.values()
        for panel in panels(board)
        if "encserve_answer_seconds" in panel["targets"][0]["expr"]
    ]
    lines = {step["value"] for shown in defaults if shown["unit"] == "s" for step in shown["thresholds"]["steps"]}
    assert lines - {None} == bounds


def test_each_refusal_reason_belongs_to_the_server_or_the_caller() -> None:
    """Each refusal reason counts either as a failure of the server or as a fault of the caller.

    The recording rule of failed calls lists the failures of the server. The alert EncserveCallersRefused lists all
    faults of callers.
    """
    (failed,) = [rule["expr"] for rule in RULES if rule.get("record") == "instance:encserve_calls_failed:total"]
    (refused,) = [alert["expr"] for alert in ALERTS if alert["alert"] == "EncserveCallersRefused"]
    of_server = set(re.findall(r'reason=~"([A-Z_|]+)"', failed)[0].split("|"))
    of_callers = set(re.findall(r'outcome=~"([A-Z_|]+)"', refused)[0].split("|"))
    reasons = {
        code: {error.reason for error, status in CALLER_ERRORS.items() if status.grpc == code}
        for code in ("RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
    }
    assert of_server <= reasons["RESOURCE_EXHAUSTED"]
    assert set().union(*reasons.values()) - of_server == of_callers
