"""The command `encserve`, called in this process."""

import asyncio
from collections.abc import Mapping

from click.testing import CliRunner, Result
from fake_encoder import FakeEncoder

from encserve_cli.commands import cli

# The environment of a terminal. Without it, the output is that of a pipe.
TERMINAL = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "110"}


async def encserve(
    service: FakeEncoder,
    *arguments: object,
    status: int = 0,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run the command with the address of a service, and check the exit status."""
    call = ["--target", service.target, *map(str, arguments)]
    result = await asyncio.to_thread(CliRunner().invoke, cli, call, input=stdin, env=env)
    assert result.exit_code == status, result.output
    return result
