"""The command `encserve serve`."""

import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import click
from click.core import ParameterSource

from encserve_cli.export_options import makes_bundles, take_options
from encserve_cli.interrupts import Interrupts
from encserve_cli.shared import SectionCommand
from encserve_server.options import read_settings, settings_options

_HTTP_PORT = 8080
_HTTP_PACKAGES = ("aiohttp", "msgspec", "orjson")


def _defaults() -> dict[str, Any]:
    """Return the defaults that differ from those of `encserve-server`.

    A person usually starts `encserve serve`, and a service manager starts `encserve-server`.
    """
    has_http = all(find_spec(name) is not None for name in _HTTP_PACKAGES)
    return {
        "http_port": _HTTP_PORT if has_http else None,
        "log_format": "text",
        "log_level": "warning" if sys.stderr.isatty() else "info",  # on a terminal, a bar replaces the log lines
    }


@click.command(cls=SectionCommand)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@partial(makes_bundles, precision_flag="--export-precision")
@partial(settings_options, defaults=_defaults())
@click.pass_context
def serve(context: click.Context, /, models: tuple[str, ...], **values: Any) -> None:
    """Serve MODEL over gRPC and HTTP. By default, only programs on this machine can connect; see --host.

    \b
    MODEL is
      OWNER/NAME, OWNER/NAME@REVISION   a model on the hub
      DIRECTORY                         a checkpoint
      DIR/NAME, DIR/NAME/VERSION        a bundle
      s3://…/NAME/VERSION               the URI of a bundle

    NAME=MODEL names the model. The first MODEL is the default model. If you give MODEL, the variables
    ENCSERVE_MODEL_REPOSITORY and ENCSERVE_MODEL have no effect.

    A checkpoint must be exported to a bundle. The first start downloads the model if it is on the hub, and then exports
    the checkpoint. Later starts use the finished bundle, and need no network and no PyTorch. Every option of
    `encserve-server` works too.
    """  # noqa: D301 - click reads a real \b
    from encserve_cli.serve_run import run_server

    options = take_options(values)
    if models:
        values |= {
            name: nothing
            for name, nothing in (("model_repository", None), ("model", ()))
            if context.get_parameter_source(name) == ParameterSource.ENVIRONMENT
        }
    if bool(models) == bool(values["model_repository"]):
        raise click.UsageError("give MODEL, such as sentence-transformers/all-MiniLM-L6-v2, or --model-repository")
    if models and values["model"]:
        raise click.UsageError("--model needs --model-repository; without --model-repository, give the models as MODEL")
    Interrupts.current().leave()  # the server has its own handlers
    run_server(models, options, partial(read_settings, context), values)
