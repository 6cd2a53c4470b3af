"""What the subcommands of `encserve` have in common."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from encserve_client import EncodeResult, EncserveError

F = TypeVar("F", bound=Callable[..., Any])


def calls_server(command: F) -> F:
    """Passes a client to a command, and makes what goes wrong one line on stderr and exit status 1."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        connect = click.get_current_context().obj
        with errors_in_one_line(), connect() as client:
            command(client, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


@contextmanager
def errors_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """Makes what a command may raise, and the other errors, one line on stderr and exit status 1."""
    caught: tuple[type[Exception], ...] = (EncserveError, ValueError, OSError, *others)
    try:
        yield
    except caught as error:
        raise click.ClickException(" ".join(str(error).split())) from error


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Prints warnings as one line on stderr, without the line of code that they come from."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        click.echo(f"Warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def check_pooling(kind: str | None, pooling: str | None) -> None:
    """Raises UsageError where --pooling and --kind contradict each other."""
    if pooling is not None and kind not in (None, "model"):
        raise click.UsageError(f"--pooling makes one vector of a text; leave it out with --kind {kind}")


def names_model(command: F) -> F:
    """Adds the options that choose a model, and --json."""
    return with_options(
        command,
        click.option("--model", help="Default: the server's default model."),
        click.option("--model-version", help="Default: the model's default version."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )


def treats_texts(command: F) -> F:
    """Adds the options that say how texts are treated."""
    return with_options(
        command,
        click.option("--task", type=click.Choice(["query", "document"]), help="What every TEXT is. Default: neither."),
        click.option(
            "--prompt-name",
            metavar="NAME",
            help='Put this before every TEXT; "" for none. Default: the model\'s.',
        ),
        click.option("--truncate", is_flag=True, help="Cut off the end of texts that are too long."),
    )


def ids_of(result: EncodeResult) -> dict[str, Any]:
    """What identifies the model that ran, and its vectors' space."""
    return {
        "model": result.model,
        "version": result.version,
        "fingerprint": result.fingerprint,
        "space_id": result.space_id,
    }


def with_options(command: F, *options: Callable[[F], F]) -> F:
    """Adds options, in the order in which the help lists them."""
    for option in reversed(options):
        command = option(command)
    return command
