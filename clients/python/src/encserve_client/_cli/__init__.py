"""The command `encserve`: looks for what it needs to print, then hands over to `_commands`."""

import sys


def main() -> None:
    """Runs the command, or says in one line what is missing."""
    try:
        from encserve_client._cli._commands import cli
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        sys.stderr.write(f"encserve needs {error.name}: pip install 'encserve-client[cli]'\n")
        sys.exit(1)
    cli(prog_name="encserve")
