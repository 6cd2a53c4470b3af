"""Tests of the JSON files of the Grafana dashboards: format, layout, labels and queries."""

import itertools
import json
import re

import pytest
from boards import DASHBOARDS, RECORDED, ROOT, metric_names, panels, queries

BOARDS = pytest.mark.parametrize("name", DASHBOARDS)


@BOARDS
def test_json_is_sorted_and_indented(name: str) -> None:
    """The JSON has sorted keys and an indent of 2, so that a change in Grafana gives a small diff in git."""
    text = (ROOT / f"deploy/grafana/dashboards/{name}.json").read_text()
    formatted = json.dumps(DASHBOARDS[name], indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert text == formatted, f"{name}.json is not formatted; docs/how-to/monitor.md has the command"


def test_uids_and_titles() -> None:
    """The uids and titles do not change. Links and bookmarks contain the uids, so a new uid would break them."""
    titles = {name: (board["uid"], board["title"]) for name, board in DASHBOARDS.items()}
    assert titles == {
        "service": ("encserve-service", "Service"),
        "latency": ("encserve-latency", "Latency"),
        "batching": ("encserve-batching", "Batching"),
        "models": ("encserve-models", "Models and process"),
    }


@BOARDS
def test_panels_do_not_overlap(name: str) -> None:
    """The panels do not overlap, and they lie within the 24 columns of the grid. Their ids are unique."""
    flat = [item for panel in DASHBOARDS[name]["panels"] for item in (panel, *panel.get("panels", ()))]
    ids = [panel["id"] for panel in flat]
    assert len(ids) == len(set(ids))
    boxes = [panel["gridPos"] for panel in flat]
    for box in boxes:
        assert 0 <= box["x"] <= box["x"] + box["w"] <= 24
    for one, other in itertools.combinations(boxes, 2):
        side_by_side = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert side_by_side or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


@BOARDS
def test_each_panel_has_a_description_and_units(name: str) -> None:
    titles = [panel["title"] for panel in panels(DASHBOARDS[name])]
    assert len(titles) == len(set(titles))
    for panel in panels(DASHBOARDS[name]):
        assert re.fullmatch(r"[A-Z][^\n]{10,119}\.", panel["description"]), panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert defaults["thresholds"]["steps"][0]["value"] is None, panel["title"]
        if panel["type"] == "heatmap":
            assert panel["options"]["yAxis"]["unit"], panel["title"]
        if len(panel["targets"]) > 1:
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@BOARDS
def test_variables_are_used(name: str) -> None:
    board = DASHBOARDS[name]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert set(variables) == {"datasource", "model", "instance"}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["current"]["value"] == "encserve-prometheus"
    for panel in panels(board):
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_queries_follow_the_time_range_and_the_instance() -> None:
    """The queries use the time window and the instance that the user has chosen in Grafana.

    Only panels about error budgets, burn rates and model loads have a fixed time window.
    """
    fixed = {"budget left": "30d", "burn": "1h", "Loads": "10m"}
    for where, expr in queries():
        windows = set(re.findall(r"\[([^\]]+)\]", expr)) - {"$__rate_interval"}
        assert windows <= {window for title, window in fixed.items() if title in where}, where
        if "ALERTS" not in expr:
            assert expr.count('instance=~"$instance"') == len(re.findall(r"\{", expr)), where


def test_metrics_are_documented() -> None:
    """The dashboards use only metrics of docs/reference/metrics.md, recorded series, and metrics of Prometheus."""
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/reference/metrics.md").read_text(), flags=re.M))
    known = {*documented, *RECORDED, "up", "ALERTS", "scrape_duration_seconds"}
    for where, expr in queries():
        names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metric_names(expr)}
        assert names, where
        assert names <= known, where
