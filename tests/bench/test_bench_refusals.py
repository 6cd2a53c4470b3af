"""bench/refusals.py: that it asks a real server, and the smallest, and says what a refusal costs each."""

import json
from pathlib import Path

import pytest
import refusals
from tiny_bundle import write_bundle
from tiny_heads import words

pytestmark = pytest.mark.system


def test_a_short_run_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path, tokenizer=words())
    refusals.main([str(tmp_path), "--rounds", "1", "--seconds", "0.5", "--calls", "200"])
    figures, refused, *throughputs = capsys.readouterr().out.splitlines()
    found = json.loads(figures)
    assert found["refusal_cpu_ms"].keys() == {"smallest", "encserve"}
    rates = found["calls_per_second"]
    assert rates.keys() == {"alone", "beside_wrong_keys", "beside_wrong_keys_elsewhere"}
    assert all(len(it) == 1 and it[0] > 0 for it in rates.values())
    assert float(refused.rpartition(" ")[2]) > 0
    assert len(throughputs) == 2
