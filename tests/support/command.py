"""Runs the command `encserve` in the test's process, and reads the output of its jobs."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from click.testing import CliRunner, Result
from fake_encoder import FakeEncoder

from encserve_cli.commands import cli

# With these variables, `encserve` formats the output for a terminal. Without them, the output is for a pipe.
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "110"}


def inputs(*files: object) -> list[str]:
    """Return the option --input for each file."""
    return [argument for file in files for argument in ("--input", str(file))]


def table_of(folder: Path) -> pyarrow.Table:
    """Return the rows of all output files of a job as one table. The files are sorted by name."""
    return pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


def rejected_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the rows that a job has rejected, in the order of the rows."""
    return [json.loads(line) for path in sorted(folder.glob("_rejected/*")) for line in path.read_text().splitlines()]


async def encserve(
    service: FakeEncoder,
    *arguments: object,
    status: int = 0,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run `encserve` against a fake service, check the exit status, and return the result."""
    call = ["--target", service.target, *map(str, arguments)]
    result = await asyncio.to_thread(CliRunner().invoke, cli, call, input=stdin, env=env)
    assert result.exit_code == status, result.output
    check_advice(call, result.stderr)
    return result


def check_advice(arguments: Sequence[str], problem: str) -> None:
    """Check that a command has every option that its error output names.

    Options in backticks are not checked, because they may belong to another command. Options in `arguments` are
    always allowed.
    """
    command = next((cli.commands[it] for it in arguments if it in cli.commands), cli)
    known = {name for it in (*command.params, *cli.params) for name in it.opts} | {"--help", *arguments}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"`[^`]*`", "", problem)))
    assert named <= known, f"the command {command.name} lacks {named - known}: {problem}"
