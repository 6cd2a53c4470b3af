"""The dashboards, laid out and labelled so that people can read them; Grafana's own models made them."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from boards import DASHBOARDS, ROOT, panels, queries

COMMITTED = ROOT / "deploy/grafana/dashboards"
BOARDS = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=list(DASHBOARDS))


def test_what_is_committed_is_what_the_generator_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts/make_dashboards.py", tmp_path], check=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in COMMITTED.iterdir()}, "run `make dashboards`"


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
