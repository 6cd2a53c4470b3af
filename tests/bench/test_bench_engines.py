"""bench/engines.py, exports.py and gpu.py: batches as the server makes them, the target, that a GPU would be measured.

On a CPU here, so that it works when there is one.
"""

import json
import re
from pathlib import Path

import exports
import gpu
import numpy as np
import pytest
from engines import SIDES, Case, as_batches, check_target
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


def test_exports_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_bundle(tmp_path, name)
    exports.main([str(tmp_path), "--model", "one", "--model", "two", "--rounds", "2", "--lengths", "9", "60"])
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"one@1: [0-9,]+ tokens per CPU second, ratio 1\.000 \[1\.000-1\.000\]", first)
    assert re.fullmatch(r"two@1: [0-9,]+ tokens per CPU second, ratio [0-9.]+ \[[0-9.]+-[0-9.]+\]", second)


def test_the_best_budget_is_that_of_the_model_asked_for() -> None:
    found = {
        gpu.Side("one@1", 64): gpu.Found([1.0, 9.0, 2.0]),
        gpu.Side("one@1", 128): gpu.Found([3.0, 3.0, 3.0]),
        gpu.Side("two@1", 64): gpu.Found([50.0]),
    }
    assert gpu.best_budget(found, "one@1") == 128
    assert gpu.best_budget(found, "two@1") == 64


def test_batches_hold_everything_once_and_their_longest_is_extended() -> None:
    sequences = [np.full(length, place) for place, length in enumerate((5, 9, 3, 30, 8, 1))]
    batches = as_batches(sequences, 32, 4, waiting=4)
    assert sorted(int(it[0]) for batch in batches for it in batch) == list(range(6))
    for batch in batches:
        *others, longest = map(len, batch)
        assert longest % 4 == 0
        assert [len(sequences[int(it[0])]) for it in batch[:-1]] == others
        assert longest * len(batch) <= 36  # the budget, and what the longest was extended by


def case(side: tuple[str, str], budget: str, *seconds: float) -> Case:
    return Case((*side, budget, "1"), None, [], [list(seconds)])  # type: ignore[arg-type] # nothing is run


def test_the_target_is_of_the_fastest_cases_where_the_cpu_has_amx() -> None:
    float32, bfloat16 = SIDES[0], SIDES[-1]
    cases = [case(float32, "256", 5.0, 4.0), case(float32, "512", 9.0), case(bfloat16, "256", 2.5, 2.0)]
    assert check_target(cases, ["avx2", "amx_bf16"]).endswith("float32: 2.00, met")
    assert check_target([*cases, case(float32, "768", 3.0)], ["amx_bf16"]).endswith("float32: 1.50, not met")
    assert check_target(cases, ["avx2"]).endswith("not applicable, this CPU has no AMX")
    assert check_target(cases[:2], ["amx_bf16"]).endswith("one of both was left out")
