"""Makes the metadata for the small tasks in mteb_judge.py and mteb_ranks.py. The tasks need no download."""

from typing import Any

from mteb.abstasks.task_metadata import TaskMetadata


def describe(name: str, kind: str, main_score: str) -> Any:
    """Return the TaskMetadata of a task with one test split in English. `kind` is a task type of MTEB."""
    return TaskMetadata(
        name=name,
        description="A few texts",
        dataset={"path": "none", "revision": "1"},
        type=kind,
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )
