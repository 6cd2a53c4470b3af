"""The flags and environment variables of the settings, for the commands `encserve-server` and `encserve serve`."""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from encserve_server.environment import PREFIX, check_environment, is_service_link
from encserve_server.settings import Settings

_API_KEY = f"{PREFIX}API_KEY"
_SYNONYMS = {"gpu": "cuda"}

Command = Callable[..., Any]


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


def settings_options(command: Command, defaults: Mapping[str, Any] = types.MappingProxyType({})) -> Command:
    """Add a flag for each setting that is not secret, in the order of the settings.

    `defaults` has other defaults than the settings, by the name of the setting.
    """
    hints = typing.get_type_hints(Settings)
    for field in reversed(dataclasses.fields(Settings)):
        if not field.metadata.get("is_secret"):
            command = _option(field, hints[field.name], defaults.get(field.name, field.default))(command)
    return command


def _option(field: "dataclasses.Field[Any]", hint: Any, default: Any) -> Callable[[Any], Any]:
    """Return the click option of a setting."""
    flag = f"--{field.name.replace('_', '-')}"
    common: dict[str, Any] = {"help": field.metadata["help"], "show_envvar": True, "show_default": True}
    common |= {"cls": _Option, "section": field.metadata["section"], "envvar": f"{PREFIX}{field.name.upper()}"}
    if default is not dataclasses.MISSING:
        common |= {"default": default}
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


def read_settings(context: click.Context, values: Mapping[str, Any]) -> Settings:
    """Return the settings of a command. The API key comes from its environment variable.

    Args:
        context: The context of the command, which has a parameter for each setting.
        values: The value of each setting with a flag.

    Raises:
        UsageError: A value is invalid, or the name of an environment variable is similar to a setting's name.
    """
    try:
        check_environment(os.environ, known_variables())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if values["model_repository"] is None:
        missing = next(it for it in context.command.params if it.name == "model_repository")
        raise click.MissingParameter(ctx=context, param=missing)
    try:
        return Settings(**values, api_key=os.environ.get(_API_KEY))
    except ValueError as error:
        raise click.UsageError(f"{error}{_origin_of(context, str(error))}") from error


def known_variables() -> set[str]:
    """Return the environment variables of all settings."""
    return {f"{PREFIX}{it.name.upper()}" for it in dataclasses.fields(Settings)}


def service_links() -> list[str]:
    """Return the variables of settings that have the address of a Service, and are ignored."""
    return [name for name in sorted(known_variables()) if _is_service_port(name, os.environ.get(name, ""))]


def _is_service_port(variable: str, value: str) -> bool:
    return variable.endswith("_PORT") and is_service_link(value)


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
