"""The measurement for a GPU runs from end to end; on a CPU here, so that it works when there is one."""

import json
import re
from pathlib import Path

import gpu
import pytest
from tiny_bundle import write_bundle


def test_it_measures_every_side_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "models", "one")
    write_bundle(tmp_path / "models", "two")
    out = tmp_path / "gpu.json"
    arguments = [str(tmp_path / "models"), "--model", "one", "--model", "two", "--device", "cpu", "--json", str(out)]
    gpu.main([*arguments, "--sequences", "40", "--rounds", "2", "--budgets", "64", "128", "--lanes", "1", "2"])
    content = json.loads(out.read_text())
    sections = {name: content[name] for name in ("budget", "lanes")}
    assert [len(its) for its in sections.values()] == [4, 4]  # two models, two of each
    assert {(it["model"], it["budget"]) for it in content["budget"]} == {
        (model, budget) for model in ("one@1", "two@1") for budget in (64, 128)
    }
    assert {it["lanes"] for it in content["lanes"]} == {1, 2}
    for its in sections.values():
        assert all(len(it["tokens_per_second"]) == 2 and it["batches"] for it in its)
    cosines = re.findall(r"\b[01]\.\d{6}\b", capsys.readouterr().out)
    assert cosines == ["1.000000"] * 6  # every row agrees with the CPU's


def test_the_best_budget_is_that_of_the_model_asked_for() -> None:
    found = {
        gpu.Side("one@1", 64): gpu.Found([1.0, 9.0, 2.0]),
        gpu.Side("one@1", 128): gpu.Found([3.0, 3.0, 3.0]),
        gpu.Side("two@1", 64): gpu.Found([50.0]),
    }
    assert gpu.best_budget(found, "one@1") == 128
    assert gpu.best_budget(found, "two@1") == 64
