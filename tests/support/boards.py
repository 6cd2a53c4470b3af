"""Reads the Grafana dashboards and the Prometheus rules in deploy/. Finds the metrics in PromQL expressions."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in ROOT.glob("deploy/grafana/dashboards/*.json")}
RULES = [
    rule
    for path in sorted(ROOT.glob("deploy/prometheus/rules/*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}

# Matches a metric's name and the label matchers after the name. The metric may come from the server, from a recording
# rule, or from Prometheus itself.
_SELECTOR = re.compile(
    r"\b(?:(?:encserve_|encserve:|grpc_server_|instance:|job:|model:|process_|python_|scrape_)[\w:]+|up\b|ALERTS\b)"
    r"(?:\{[^}]*\})?"
)


def panels(dashboard: Any) -> Iterator[Any]:
    """Yield all panels of a dashboard. Panels in collapsed rows are included."""
    for panel in dashboard["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def queries() -> list[tuple[str, str]]:
    """Return (label, expression) for each query of the dashboards.

    The label contains the dashboard, the panel and the letter of the query.
    """
    return [
        (f"{name}: {panel['title']} {target['refId']}", target["expr"])
        for name, dashboard in DASHBOARDS.items()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def selectors(expr: str) -> set[str]:
    """Return the vector selectors of a PromQL expression, without time ranges and offsets."""
    return set(_SELECTOR.findall(expr))


def metric_names(expr: str) -> set[str]:
    """Return the names of the metrics in an expression."""
    return {selector.partition("{")[0] for selector in selectors(expr)}
