"""bench/bulk.py: that it measures what it says, on the demo's own weights; its figures are not tested."""

import json
from pathlib import Path

import bulk
import pytest
from checkpoints import minilm_directory
from harness.rounds import Measurement
from real_server import cpu_has_bfloat16

from encserve_export import Target, export_hf

pytestmark = pytest.mark.system


def test_a_job_is_measured_beside_the_model_alone_and_sentence_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SWEPT", 10)
    monkeypatch.setattr(bulk, "BATCH_SIZES", (4, 8))
    export_hf(minilm_directory(), Target(model_repository=tmp_path / "models", name="m"))
    arguments = [
        str(tmp_path / "models"),
        "--checkpoint",
        str(minilm_directory()),
        "--json",
        str(tmp_path / "found.json"),
    ]
    bulk.main([*arguments, "--texts", "40", "--part-rows", "15", "--rounds", "1"])
    found, printed = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    suffixes = ("", "-bfloat16") if cpu_has_bfloat16() else ("",)
    assert set(found["sides"]) == {name + it for name in ("ceiling", "job", "sentence-transformers") for it in suffixes}
    assert len(found["targets"]) == 2 * len(suffixes)
    assert ("bfloat16 is left out: " in printed) == (not cpu_has_bfloat16())
    assert found["workload"]["texts"] == 40


def test_each_job_is_held_to_the_sides_of_its_own_precision() -> None:
    rates = {"ceiling": 100, "job": 96, "sentence-transformers": 70}
    rates |= {"ceiling-bfloat16": 200, "job-bfloat16": 179, "sentence-transformers-bfloat16": 50}
    found = {name: [Measurement(rate, 1.0)] for name, rate in rates.items()}
    assert [(it.text, it.wanted, it.met) for it in bulk.job_targets(found)] == [
        ("job, ratio to ceiling", "≥ 0.95", True),
        ("job, ratio to sentence-transformers", "≥ 1.5", False),
        ("job-bfloat16, ratio to ceiling-bfloat16", "≥ 0.9", False),
        ("job-bfloat16, ratio to sentence-transformers-bfloat16", "≥ 2.5", True),
    ]
