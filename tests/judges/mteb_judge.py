"""Runs the MTEB code of docs/how-to/http-clients.md on a small task that needs no download.

The program runs as `PROGRAM REQUESTS BLOCK...` in the virtual environment of the requirements file mteb.txt. REQUESTS
is a JSON file with `pairs`. A pair has two texts and their similarity. Each BLOCK is a file with a code block
of docs/how-to/http-clients.md. The code block reads the variable `tasks` and sets the variable `results`. The program
prints the scores of all blocks as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb_task import describe

requests_file, *blocks = map(Path, sys.argv[1:])
pairs = json.loads(requests_file.read_text(encoding="utf-8"))["pairs"]


# mteb is installed only in the judge's environment, so mypy does not know the base class.
class Pairs(AbsTaskSTS):  # type: ignore[misc]
    """A task with pairs of texts.

    The score is Spearman's correlation between the similarities in `pairs` and the cosine similarities of the vectors.
    """

    metadata = describe("Pairs", "STS", "cosine_spearman")
    min_score, max_score = 0, 5

    def load_data(self, *args: Any, **options: Any) -> None:
        """Build the data set from the pairs."""
        del args, options
        first, second, score = map(list, zip(*pairs, strict=True))
        self.dataset = DatasetDict(test=Dataset.from_dict({"sentence1": first, "sentence2": second, "score": score}))
        self.data_loaded = True


scores = []
for block in blocks:
    names: dict[str, Any] = {"tasks": [Pairs()]}
    exec(compile(block.read_text(encoding="utf-8"), block, "exec"), names)  # noqa: S102 - runs lines of our docs
    scores.append(names["results"].task_results[0].get_score())
sys.stdout.write(f"\n{json.dumps(scores)}")
