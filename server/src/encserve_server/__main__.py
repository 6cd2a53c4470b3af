"""The command `encserve-server`: reads flags and environment variables, and starts the server."""

import dataclasses
import logging
import os
import re
import signal
import types
import typing
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import uvloop
from click.core import ParameterSource

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reads it on import; gRPC's own log lines are not JSON
from encserve import __version__
from encserve_server.app import serve
from encserve_server.callers.keys import digest_of, make_key
from encserve_server.environment import PREFIX, check_environment, is_service_link
from encserve_server.settings import SECTIONS, Settings
from encserve_server.system import descriptors, memory
from encserve_server.telemetry import logs

logger = logging.getLogger(__name__)

_API_KEY = f"{PREFIX}API_KEY"
_SYNONYMS = {"gpu": "cuda"}


class _Option(click.Option):
    """A flag in a section of the help.

    The flag ignores the address of a Service, which Kubernetes may set in the flag's environment variable.
    """

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        self.section = section
        super().__init__(*args, **kwargs)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value is not None and _is_service_port(f"{self.envvar}", value) else value


class _Choice(click.Choice[str]):
    """A choice that suggests the nearest value in its error."""

    def get_invalid_choice_message(self, value: str, ctx: click.Context | None) -> str:
        near = _SYNONYMS.get(value.lower()) or next(iter(get_close_matches(value.lower(), self.choices, 1)), "")
        message = super().get_invalid_choice_message(value, ctx)
        return f"{message} Did you mean {near!r}?" if near in self.choices else message


class _Group(click.Group):
    """A command whose help lists the options in sections, the commonest options first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[getattr(parameter, "section", SECTIONS[0])].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        self.format_commands(ctx, formatter)


def _is_service_port(variable: str, value: str) -> bool:
    return variable.endswith("_PORT") and is_service_link(value)


def _option(field: "dataclasses.Field[Any]", hint: Any) -> Callable[[Any], Any]:
    """Return the click option of a setting."""
    flag = f"--{field.name.replace('_', '-')}"
    common: dict[str, Any] = {"help": field.metadata["help"], "show_envvar": True, "show_default": True}
    common |= {"cls": _Option, "section": field.metadata["section"], "envvar": f"{PREFIX}{field.name.upper()}"}
    if field.default is not dataclasses.MISSING:
        common |= {"default": field.default}
    if isinstance(hint, types.UnionType):  # such as `int | None`; for None, the server chooses the default
        hint = typing.get_args(hint)[0]
    if hint is bool:
        return click.option(f"{flag}/--no-{field.name.replace('_', '-')}", **common)
    if typing.get_origin(hint) is typing.Literal:
        return click.option(flag, type=_Choice(typing.get_args(hint), case_sensitive=False), **common)
    if typing.get_origin(hint) is tuple:
        return click.option(flag, multiple=True, **common)
    if hint is Path:
        return click.option(flag, type=click.Path(path_type=Path), **common)
    return click.option(flag, type=hint, **common)


def _settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for each setting that is not secret, in the order of the settings."""
    hints = typing.get_type_hints(Settings)
    for field in reversed(dataclasses.fields(Settings)):
        if not field.metadata.get("is_secret"):
            command = _option(field, hints[field.name])(command)
    return command


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"auto_envvar_prefix": "ENCSERVE", "max_content_width": 110},
)
@_settings_options
@click.version_option(__version__, prog_name="encserve-server")
@click.pass_context
def main(context: click.Context, /, **values: Any) -> None:
    """Serve encoder models over gRPC and HTTP, with Prometheus metrics.

    The environment variable ENCSERVE_API_KEY sets the key that every call must present. The key has no flag, because
    all users of the machine can see the flags of a process.
    """
    descriptors.open_standard_descriptors()
    if context.invoked_subcommand is not None:
        return
    known = {f"{PREFIX}{it.name.upper()}" for it in dataclasses.fields(Settings)}
    try:
        unknown = check_environment(os.environ, known)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if values["model_repository"] is None:
        raise click.MissingParameter(ctx=context, param=next(it for it in main.params if it.name == "model_repository"))
    try:
        settings = Settings(**values, api_key=os.environ.get(_API_KEY))
    except ValueError as error:
        raise click.UsageError(f"{error}{_origin_of(context, str(error))}") from error
    descriptors.make_messages_of_libraries_nonblocking()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until `serve` sets a handler for SIGHUP
    memory.limit_arenas()
    memory.freeze_gc()
    log = logs.configure(settings.log_level, settings.log_format)
    if unknown:
        logger.warning("unknown environment variables with the prefix ENCSERVE_", extra={"variables": unknown})
    if links := [name for name in sorted(known) if _is_service_port(name, os.environ.get(name, ""))]:
        logger.warning(
            "environment variables of Kubernetes service links are ignored: rename the Service, or set "
            "enableServiceLinks: false for the pod",
            extra={"variables": links},
        )
    allowed = descriptors.allowed_connections(settings.max_connections)
    exit_process(uvloop.run(serve(dataclasses.replace(settings, max_connections=allowed), log)))


def _origin_of(context: click.Context, problem: str) -> str:
    """Return the flags and variables that set the wrong settings, in brackets. `problem` is an error of `Settings`."""
    sources = {
        ParameterSource.COMMANDLINE: lambda name: f"--{name.replace('_', '-')}",
        ParameterSource.ENVIRONMENT: lambda name: f"{PREFIX}{name.upper()}",
    }
    words = re.findall(r"\w+", problem)
    given = [(name, context.get_parameter_source(name)) for name in context.params if name in words]
    names = [sources[source](name) for name, source in given if source in sources]
    return f" (set by {', '.join(names)})" if names else ""


@main.command("hash-key")
def hash_key() -> None:
    """Make a random key, and print it with its SHA-256.

    Give the key to the caller. The command does not store the key. Put the hash into key_sha256 in the callers file.
    """
    key = make_key()
    click.echo(f"key         {key}\nkey_sha256  {digest_of(key).hex()}")


def exit_process(status: int) -> None:
    """End the process at once, even if a thread is busy with a stuck engine or a long text.

    `logging.shutdown` is not used, because it would flush `sys.stderr`. A flush waits for ever if `sys.stderr` is a
    pipe without a reader.
    """
    for handler in logging.getLogger().handlers:
        handler.close()
    os._exit(status)


if __name__ == "__main__":
    main()
