"""The options of the connection to a server. The options may come before or after the name of the command."""

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from encserve_cli.shared import CONNECTION, SectionOption, say, with_options

if TYPE_CHECKING:
    from encserve_client import AsyncEncoderClient, EncoderClient, Outage, Priority, Tls

Command = Callable[..., Any]
FILE_TIMEOUT_SECONDS = 300.0
Client = TypeVar("Client")

_OPTIONS: dict[str, dict[str, Any]] = {  # flag → arguments of `click.option`
    "--target": {
        "default": "localhost:50051",
        "show_default": True,
        "show_envvar": True,
        "metavar": "HOST:PORT",
        "help": "The server. The default port is 50051.",
    },
    "--timeout": {
        "type": float,
        "metavar": "SECONDS",
        "help": "The time for one message, with all retries. Many texts are sent as several messages.",
    },
    "--tls": {"is_flag": True, "help": "Encrypt, and check the server's certificate."},
    "--ca": {"type": click.Path(path_type=Path), "help": "PEM file of trusted authorities; implies --tls."},
    "--cert": {"type": click.Path(path_type=Path), "help": "PEM file of the client's certificate; implies --tls."},
    "--tls-key": {"type": click.Path(path_type=Path), "help": "PEM file of the private key of --cert."},
    "--server-name": {
        "metavar": "NAME",
        "help": "The name in the server's certificate; implies --tls. Default: the target's host.",
    },
    "--api-key": {
        "metavar": "KEY",
        "show_envvar": True,
        "help": "The server's API key, or any bearer token. Use --tls with a key.",
    },
    "--metadata": {"multiple": True, "metavar": "NAME=VALUE", "help": "Metadata of every call; may be repeated."},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The server and the credentials of a command.

    Attributes:
        target: The server; see `EncoderClient`.
        timeout_seconds: The time for one message, with all retries.
        file_timeout_seconds: `timeout_seconds` of commands that read files. The default is enough for a restart of the
            server.
        tls: The files and the name for TLS; False for plaintext.
        api_key: The key of the server, or None.
        metadata: Names and values for every call.
    """

    target: str
    timeout_seconds: float
    file_timeout_seconds: float = FILE_TIMEOUT_SECONDS
    tls: "Tls | bool"
    api_key: str | None
    metadata: tuple[tuple[str, str], ...]

    def client(self, priority: "Priority | None" = None, *, reads_files: bool) -> "EncoderClient":
        """Return a new client.

        `reads_files`: whether the inputs come from files.

        Raises:
            InvalidInputError: An option is not valid, or a file of `tls` is not readable.
        """
        from encserve_client import EncoderClient

        timeout_seconds = self.file_timeout_seconds if reads_files else self.timeout_seconds
        return self._open(EncoderClient, timeout_seconds, priority)

    def async_client(self) -> "AsyncEncoderClient":
        """Return a new client for asyncio. Raises the errors of `client`."""
        from encserve_client import AsyncEncoderClient

        return self._open(AsyncEncoderClient, self.timeout_seconds)

    def _open(self, kind: Callable[..., Client], timeout_seconds: float, priority: "Priority | None" = None) -> Client:
        return kind(  # all clients are made here, so that a warning is shown once
            self.target,
            tls=self.tls,
            timeout_seconds=timeout_seconds,
            api_key=self.api_key,
            metadata=self.metadata,
            priority=priority,
            on_outage=_outage_lines(),
        )


def _outage_lines() -> "Callable[[Outage], None]":
    """Return a function that writes outages on stderr.

    Concurrent calls report the same outage. The function writes one line when the outage starts, and one line when the
    outage ends.
    """
    lock = threading.Lock()
    is_away = False

    def show(outage: "Outage") -> None:
        nonlocal is_away
        with lock:
            if is_away is not outage.is_over:
                return
            is_away = not outage.is_over
            limit = "" if outage.seconds_left == math.inf else f" for {outage.seconds_left:.0f} s"
            state = "is back" if outage.is_over else f"is away: trying again{limit}"
            say(f"server {outage.target} {state}")

    return show


def connection_options(command: Command, *, has_input: bool = True) -> Command:
    """Add the connection options to a command.

    `click.Context.obj` is then a `Connection`. Options after the name of the command override options before the name.

    `has_input`: whether the command has --input, which changes the default of --timeout.
    """
    timeout = dict(_OPTIONS["--timeout"])
    timeout["help"] += f" Default: 30{', or 300 with --input' if has_input else ''}."

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> Any:
        context = click.get_current_context()
        given = {name: options.pop(name) for name in _NAMES}
        if context.parent is not None:
            typed = {name for name in _NAMES if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
            given = {name: given[name] if name in typed else context.parent.params[name] for name in _NAMES}
            context.obj = _connection(**given)
        return command(*args, **options)

    return with_options(
        wrapper,
        *(
            click.option(flag, cls=SectionOption, section=CONNECTION, envvar=f"ENCSERVE_{_name(flag).upper()}", **its)
            for flag, its in (_OPTIONS | {"--timeout": timeout}).items()
        ),
    )


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


_NAMES = tuple(map(_name, _OPTIONS))


def _connection(
    *,
    target: str,
    timeout: float | None,
    tls: bool,
    ca: Path | None,
    cert: Path | None,
    tls_key: Path | None,
    server_name: str | None,
    api_key: str | None,
    metadata: tuple[str, ...],
) -> Connection:
    from encserve_client import Tls

    if (cert is None) != (tls_key is None):
        given, missing = ("--cert", "--tls-key") if cert else ("--tls-key", "--cert")
        raise click.UsageError(f"{given} needs {missing}; give both or none")
    if wrong := [pair for pair in metadata if "=" not in pair]:
        raise click.UsageError(f"--metadata must be NAME=VALUE; was {wrong[0]!r}")
    return Connection(
        target=target,
        timeout_seconds=30.0 if timeout is None else timeout,
        file_timeout_seconds=FILE_TIMEOUT_SECONDS if timeout is None else timeout,
        tls=Tls(ca=ca, cert=cert, key=tls_key, server_name=server_name) if ca or cert or server_name or tls else False,
        api_key=api_key,
        metadata=tuple((name, value) for name, _, value in (pair.partition("=") for pair in metadata)),
    )
