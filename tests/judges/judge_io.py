"""Reads the arguments of a judge, and writes the judge's results.

A judge is a program `*_judge.py` that calls the server with another project's client.

Each judge runs as `PROGRAM ADDRESS MODEL REQUESTS RESULTS`. REQUESTS is a JSON file with `texts`, `ids` and `mask`.
The judge writes vectors to the .npz file RESULTS, and prints other results as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

address, model, _requests_file, _results_file = sys.argv[1:]
_requests = json.loads(Path(_requests_file).read_text(encoding="utf-8"))
texts: list[str] = _requests["texts"]
ids, mask = np.array(_requests["ids"]), np.array(_requests["mask"])  # (batch, seq) int64


def write(vectors: dict[str, Any], facts: dict[str, Any]) -> None:
    np.savez(_results_file, **vectors)
    sys.stdout.write(json.dumps(facts))
