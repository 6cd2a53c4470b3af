"""The protocol of the benchmark and a program in a peer's environment: each question and answer is a line of JSON.

The module runs in the environments of the peers, so it imports the standard library only.
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
        prepare: Loads everything. Returns the first answer, which needs no question, and the handlers by name. The
            field `do` of a question names the handler. The other fields are the handler's arguments.
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
