"""The dashboards' JSON: its format, its layout, and the labels of every panel."""

import itertools
import json
import re
from typing import Any

import pytest
from boards import DASHBOARDS, RECORDED, ROOT, metric_names, panels, queries

BOARDS = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=list(DASHBOARDS))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_json_is_sorted_and_indented(name: str) -> None:
    """A change in Grafana then shows as a small difference in git."""
    text = (ROOT / f"deploy/grafana/dashboards/{name}.json").read_text()
    formatted = json.dumps(DASHBOARDS[name], indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert text == formatted, "see docs/operations.md for the command that formats a dashboard"


def test_there_are_four_with_fixed_and_different_names() -> None:
    titles = {name: (board["uid"], board["title"]) for name, board in DASHBOARDS.items()}
    assert titles == {
        "service": ("encserve-service", "Service"),
        "latency": ("encserve-latency", "Latency"),
        "batching": ("encserve-batching", "Batching"),
        "models": ("encserve-models", "Models and process"),
    }


@BOARDS
def test_panels_lie_beside_each_other(board: Any) -> None:
    """Inside the grid of 24 columns, none upon another, each row's below its heading, every id once."""
    flat = [it for panel in board["panels"] for it in (panel, *panel.get("panels", ()))]
    ids = [panel["id"] for panel in flat]
    assert len(ids) == len(set(ids))
    boxes = [panel["gridPos"] for panel in flat]
    for box in boxes:
        assert box["x"] >= 0
        assert box["x"] + box["w"] <= 24
    for one, other in itertools.combinations(boxes, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


@BOARDS
def test_every_panel_says_what_it_shows(board: Any) -> None:
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) == len(set(titles))
    for panel in panels(board):
        assert re.fullmatch(r"[A-Z][^\n]{10,119}\.", panel["description"]), panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert defaults["thresholds"]["steps"][0]["value"] is None, panel["title"]
        if panel["type"] == "heatmap":
            assert panel["options"]["yAxis"]["unit"], panel["title"]
        if len(panel["targets"]) > 1:
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@BOARDS
def test_everything_goes_by_the_variables(board: Any) -> None:
    variables = {it["name"]: it for it in board["templating"]["list"]}
    assert set(variables) == {"datasource", "model", "instance"}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["current"]["value"] == "encserve-prometheus"
    for panel in panels(board):
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_windows_follow_the_time_range() -> None:
    """Every rate is over $__rate_interval, except where a window is what is shown: budgets, burn, and loads."""
    fixed = {"budget left": "30d", "burn": "1h", "Loads": "10m"}
    for where, expr in queries():
        windows = set(re.findall(r"\[([^\]]+)\]", expr)) - {"$__rate_interval"}
        assert windows <= {window for title, window in fixed.items() if title in where}, where


def test_every_query_can_be_narrowed_to_an_instance() -> None:
    for where, expr in queries():
        if "ALERTS" not in expr:
            assert expr.count('instance=~"$instance"') == len(re.findall(r"\{", expr)), where


def test_every_query_reads_a_known_metric() -> None:
    """A metric of docs/metrics.md, which the code writes, a recorded series, or a series of Prometheus itself."""
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/metrics.md").read_text(), flags=re.M))
    known = {*documented, *RECORDED, "up", "ALERTS", "scrape_duration_seconds"}
    for where, expr in queries():
        names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metric_names(expr)}
        assert names, where
        assert names <= known, where
