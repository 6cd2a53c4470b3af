"""The commands `encserve`, `encserve-server` and `encserve-export`.

All three are always installed. If the extra of a command is not installed, the command prints one line that says so.
"""

import sys

from encserve.extras import needs

# The extras of the commands of `encserve`. All other commands need the extra cli.
_EXTRAS = {"serve": "cpu", "pull": "export"}


def encserve() -> None:
    """Run `encserve`."""
    verb = next((it for it in sys.argv[1:2] if not it.startswith("-")), "")
    with needs(f"encserve {verb}".rstrip(), _EXTRAS.get(verb, "cli"), SystemExit):
        from encserve_cli.commands import cli

        cli(prog_name="encserve")


def encserve_server() -> None:
    """Run `encserve-server`."""
    with needs("encserve-server", "cpu", SystemExit):
        from encserve_server.__main__ import main

        main(prog_name="encserve-server")


def encserve_export() -> None:
    """Run `encserve-export`."""
    with needs("encserve-export", "export", SystemExit):
        from encserve_export.cli import main

        main(prog_name="encserve-export")
