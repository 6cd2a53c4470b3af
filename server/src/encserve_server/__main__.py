"""The command `encserve-server`: reads flags and environment variables, and starts the server."""

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import click
import uvloop

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reads it on import; gRPC's own log lines are not JSON
from encserve import __version__
from encserve_server.app import serve
from encserve_server.callers.keys import digest_of, make_key
from encserve_server.environment import check_environment
from encserve_server.options import known_variables, read_settings, service_links, settings_options
from encserve_server.settings import SECTIONS, Settings
from encserve_server.system import descriptors, memory
from encserve_server.telemetry import logs
from encserve_server.telemetry.lines import LineWriter

logger = logging.getLogger(__name__)


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


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"auto_envvar_prefix": "ENCSERVE", "max_content_width": 110},
)
@settings_options
@click.version_option(__version__, prog_name="encserve-server")
@click.pass_context
def main(context: click.Context, /, **values: Any) -> None:
    """Serve encoder models over gRPC and HTTP, with Prometheus metrics.

    The environment variable ENCSERVE_API_KEY sets the key that every call must present. The key has no flag, because
    all users of the machine can see the flags of a process.
    """
    descriptors.open_standard_descriptors()
    if context.invoked_subcommand is None:
        exit_process(run(read_settings(context, values), serve))


def run(settings: Settings, serve: Callable[[Settings, LineWriter[str]], Coroutine[Any, Any, int]]) -> int:
    """Prepare the process for a server, and run the server. Return the exit status of `serve`."""
    descriptors.make_messages_of_libraries_nonblocking()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until `serve` sets a handler for SIGHUP
    memory.limit_arenas()
    memory.freeze_gc()
    log = logs.configure(settings.log_level, settings.log_format)
    if unknown := check_environment(os.environ, known_variables()):
        logger.warning("unknown environment variables with the prefix ENCSERVE_", extra={"variables": unknown})
    if links := service_links():
        logger.warning(
            "environment variables of Kubernetes service links are ignored: rename the Service, or set "
            "enableServiceLinks: false for the pod",
            extra={"variables": links},
        )
    allowed = descriptors.allowed_connections(settings.max_connections)
    return uvloop.run(serve(dataclasses.replace(settings, max_connections=allowed), log))


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
