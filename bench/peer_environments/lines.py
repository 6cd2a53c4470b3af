"""The protocol between the benchmark and a program in a peer's virtual environment.

A peer is another inference program that the benchmark measures. Each question and each answer is a line of JSON. This
module runs in the environments of all peers, so it imports only the standard library.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: metadata.version(name) for name in packages}


def answer_lines(prepare: Callable[[], tuple[dict[str, Any], Mapping[str, Callable[..., dict[str, Any]]]]]) -> None:
    """Answer questions until standard input ends.

    Args:
        prepare: Loads the model or the workload. Returns the first answer, which needs no question, and the handlers by
            name. The field `do` of a question is the handler's name. The other fields are the handler's arguments.
    """
    # Only answers go to standard output. The output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def give(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    first, handlers = prepare()
    give(first)
    for line in sys.stdin:
        question = json.loads(line)
        give(handlers[question.pop("do")](**question))
