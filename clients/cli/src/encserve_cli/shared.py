"""What the subcommands of `encserve` have in common."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from encserve_client import EncserveError

F = TypeVar("F", bound=Callable[..., Any])


def calls_server(command: F) -> F:
    """Passes a client to a command, and makes what goes wrong one line on stderr and exit status 1."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        connect = click.get_current_context().obj
        try:
            with connect() as client:
                command(client, *args, **kwargs)
        except (EncserveError, ValueError, OSError) as error:
            raise click.ClickException(" ".join(str(error).split())) from error

    return wrapper  # type: ignore[return-value]


def names_model(command: F) -> F:
    """Adds the options that choose a model, and --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--model-version", help="Default: the model's default version."),
        click.option("--model", help="Default: the server's default model."),
    ):
        command = option(command)
    return command
