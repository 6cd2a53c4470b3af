"""Decorators and checks that several commands of `encserve` use."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from encserve_client import EncodeResult

F = TypeVar("F", bound=Callable[..., Any])

STOPPED = 130  # the exit status after Ctrl-C, as in a shell
CONNECTION = "Connection"  # the section of the connection options

# Argument of the client (`EncserveError.field`) → option.
_OPTIONS: Mapping[str, str] = {
    "target": "--target",
    "timeout_seconds": "--timeout",
    "tls.ca": "--ca",
    "tls.cert": "--cert",
    "tls.key": "--tls-key",
    "tls.server_name": "--server-name",
    "api_key": "--api-key",
    "metadata": "--metadata",
    "model": "--model",
    "version": "--model-version",
    "kind": "--kind",
    "pooling": "--pooling",
    "task": "--task",
    "prompt_name": "--prompt-name",
    "dimensions": "--dimensions",
    "dtype": "--dtype",
    "attention": "--layers",
    "hidden_states": "--layers",
    "top_k": "--top-k",
    "activation": "--activation",
    "max_document_tokens": "--max-document-tokens",
}


class SectionOption(click.Option):
    """An option in a section of the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        """`section` is the title of the section. The other arguments are those of `click.Option`."""
        self.section = section
        super().__init__(*args, **kwargs)


rare_option = functools.partial(click.option, cls=SectionOption, section="More options")


def write_sections(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options into a help. Options without a section come first, and the connection options last."""
    sections: dict[str, list[tuple[str, str]]] = {"Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
        if record is not None:
            sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
    for title, records in sorted(sections.items(), key=lambda section: section[0] == CONNECTION):
        with formatter.section(title):
            formatter.write_dl(records)


class SectionCommand(click.Command):
    """A command with sections of options in its help."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        write_sections(self, ctx, formatter)


def with_client(command: F) -> F:
    """Pass a client to a command with connection options. Errors become one line on stderr and exit status 1."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        connection = click.get_current_context().obj
        reads_files = "sources" in kwargs and bool(kwargs["sources"].files)
        with errors_in_one_line(), connection.client(reads_files=reads_files) as client:
            command(client, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def say(line: str) -> None:
    """Write a line to stderr, above a progress bar. `click.echo` would write into the bar."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def errors_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """Print the errors of commands, and the errors `others`, as one line on stderr, and exit with status 1.

    An error about an argument of the client names the option instead. If the reader of stdout has closed the pipe, as
    in `encserve … | head -1`, click exits with status 1 and prints nothing.
    """
    from encserve_client import EncserveError

    caught: tuple[type[Exception], ...] = (EncserveError, ValueError, OSError, *others)
    try:
        yield
    except BrokenPipeError:
        raise
    except caught as error:
        raise click.ClickException(one_line(error)) from error


def one_line(error: Exception) -> str:
    """Return the message of an error on one line. Options replace the names of the client's arguments."""
    from encserve_client import EncserveError

    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, EncserveError) and (option := _OPTIONS.get(error.field.partition("[")[0])):
        text = f"{option}{text.removeprefix(error.field)}"
    # The error of an input from a file has the client's error as its cause.
    reasons = [getattr(it, "reason", "") for it in (error, error.__cause__)]
    if "SEQUENCE_TOO_LONG" in reasons and not lacks_option("--truncate"):
        text = f"{text} (--truncate)"
    return " ".join(text.split())


def lacks_option(name: str) -> bool:
    """Return whether a command runs in this thread, and the command has no option with this name."""
    context = click.get_current_context(silent=True)
    return context is not None and all(name not in it.opts for it in context.command.params)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings as one line on stderr, without the source line."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def check_pooling(kind: str | None, pooling: str | None) -> None:
    """Raise UsageError if --pooling and --kind contradict each other."""
    if pooling is not None and kind not in (None, "model"):
        raise click.UsageError(f"--pooling does not apply to --kind {kind}; leave out --pooling")


def model_options(command: F) -> F:
    """Add --model, --model-version and --json."""
    return with_options(
        command,
        click.option("--model", metavar="NAME", help="The model. Default: the server's default model."),
        rare_option(
            "--model-version", metavar="VERSION", help="The version of the model. Default: the model's default version."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )


def text_options(command: F) -> F:
    """Add --task, --prompt-name and --truncate."""
    return with_options(
        command,
        click.option(
            "--task", type=click.Choice(["query", "document"]), help="Whether each TEXT is a query or a document."
        ),
        rare_option(
            "--prompt-name",
            metavar="NAME",
            help='The name of the prompt before every TEXT; "" for no prompt. Default: the model\'s default prompt.',
        ),
        click.option("--truncate", is_flag=True, help="Cut the end of texts that are too long."),
    )


def ids_of(result: "EncodeResult") -> dict[str, Any]:
    """Return the name, the version and the ids of the model."""
    return {
        "model": result.model,
        "version": result.version,
        "fingerprint": result.fingerprint,
        "space_id": result.space_id,
    }


def with_options(command: F, *options: Callable[[F], F]) -> F:
    """Add options to a command. The help lists the options in the same order."""
    for option in reversed(options):
        command = option(command)
    return command
