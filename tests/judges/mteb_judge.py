"""Runs in the environment of mteb.txt: the lines that docs/http.md shows for MTEB, on a task that needs no download.

Reads the file of requests, JSON with `pairs` of two texts and their likeness, and the files of the blocks, which find
the task as `tasks` and make `results`; writes the score of each to stdout.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

requests_file, *blocks = map(Path, sys.argv[1:])
pairs = json.loads(requests_file.read_text(encoding="utf-8"))["pairs"]


class Pairs(AbsTaskSTS):  # type: ignore[misc] # its types are in its own environment
    """Spearman's correlation of cosines with the likeness."""

    metadata = TaskMetadata(
        name="Pairs",
        description="A few pairs of texts",
        dataset={"path": "none", "revision": "1"},
        type="STS",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )
    min_score, max_score = 0, 5

    def load_data(self, *args: Any, **options: Any) -> None:
        """There is nothing to load."""
        del args, options
        first, second, score = map(list, zip(*pairs, strict=True))
        self.dataset = DatasetDict(test=Dataset.from_dict({"sentence1": first, "sentence2": second, "score": score}))
        self.data_loaded = True


scores = []
for block in blocks:
    names: dict[str, Any] = {"tasks": [Pairs()]}
    exec(compile(block.read_text(encoding="utf-8"), block, "exec"), names)  # noqa: S102 - what it is for
    scores.append(names["results"].task_results[0].get_score())
sys.stdout.write(f"\n{json.dumps(scores)}")
