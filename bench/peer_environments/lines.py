"""How a program in a peer's environment talks to the benchmark: one line of JSON for a question, one for its answer.

Runs in the environments of the peers, so it imports nothing that they might not have.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """The versions of installed packages."""
    return {name: metadata.version(name) for name in packages}


def answer_lines(prepare: Callable[[], tuple[dict[str, Any], Mapping[str, Callable[..., dict[str, Any]]]]]) -> None:
    """Answers until standard input ends.

    Args:
        prepare: Makes everything ready; gives the first answer, which nobody asks for, and what answers a question by
            the name in its field `do`. Its other fields are the arguments.
    """
    # Libraries print what they like; the answers alone go where they are read.
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
