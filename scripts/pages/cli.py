"""Makes the page of the commands `encserve`, `encserve-server` and `encserve-export`, from their help."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator

import click

from encserve_cli.commands import cli as encserve
from encserve_cli.shared import CONNECTION
from encserve_export.cli import main as encserve_export
from encserve_server.__main__ import main as encserve_server
from encserve_server.settings import Settings

HEAD = """\
# Commands

Every command with its options, written from the code by `make docs`. `--help` after a command prints the same. If the
table shows "env var" for an option, you can also set the option with that environment variable. The option takes
precedence over the variable.
"""
CONNECTION_NOTE = "The [connection options](#connection-options) apply too.\n"
SETTINGS_NOTE = "Every flag of [Settings](settings.md) is an option too.\n"
DEFAULTS_NOTE = "[Serve a model](../how-to/serve.md) has the defaults that differ.\n"
OPTIONS = """
| option | meaning |
|---|---|
"""
PROGRAMS = {"encserve": encserve, "encserve-server": encserve_server, "encserve-export": encserve_export}
SETTINGS = {field.name for field in dataclasses.fields(Settings) if not field.metadata.get("is_secret")}


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name, command in PROGRAMS.items():
        parts += _described(command, click.Context(command, info_name=name, **command.context_settings))
    return "".join(parts)


def _described(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the description of a command, and then of its subcommands."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"\n## {context.command_path}\n\n```text\n{usage}\n```\n\n"
    yield _markdown(inspect.cleandoc(command.help or ""))
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.commands[name]
            yield from _described(inner, click.Context(inner, info_name=name, parent=context))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the table of the options. Settings and connection options have one table for all commands."""
    own: list[tuple[str, str]] = []
    connection: list[tuple[str, str]] = []
    options = {it.name: it for it in command.params if isinstance(it, click.Option)}
    has_settings = options.keys() >= SETTINGS
    for name, option in options.items():
        record = option.get_help_record(context)
        if record is not None and not option.is_eager and not (has_settings and name in SETTINGS):
            (connection if getattr(option, "section", "") == CONNECTION else own).append(record)
    if own:
        yield _table(own)
    if connection and context.parent is None:
        yield "\n### Connection options\n" + _table(connection)
    elif connection:
        yield "\n" + CONNECTION_NOTE
    if has_settings:
        yield "\n" + SETTINGS_NOTE
        yield DEFAULTS_NOTE if command is encserve.commands["serve"] else ""


def _table(records: Iterable[tuple[str, str]]) -> str:
    rows = (f"| `{_cell(flag)}` | {_cell(meaning)} |\n" for flag, meaning in records)
    return OPTIONS + "".join(rows)


def _cell(text: str) -> str:
    text = re.sub(r"([\d.]+)<=x<=([\d.]+)", r"\1 to \2", text)
    text = re.sub(r"x>=([\d.]+)", r"at least \1", text)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _markdown(text: str) -> str:
    r"""Return a help text as Markdown. A paragraph after `\b` keeps its lines, as on the terminal."""
    parts = []
    for paragraph in text.split("\n\n"):
        title, _, block = paragraph.removeprefix("\b\n").partition("\n")
        parts.append(f"{title}\n\n```text\n{block}\n```\n" if paragraph.startswith("\b\n") else f"{paragraph}\n")
    return "\n".join(parts)
