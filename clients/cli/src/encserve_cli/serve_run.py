"""The work of `encserve serve`: prepares the bundles while the server's ports are open, then serves the bundles."""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from encserve import hub
from encserve.extras import needs
from encserve_cli.bundles.argument import BundleFolder, Checkpoint, HubModel, Model, read_model, split_name
from encserve_cli.bundles.exporting import ExportOptions
from encserve_cli.bundles.finding import prepare
from encserve_cli.bundles.links import links_folder
from encserve_cli.bundles.work import ShownWork, Stopped
from encserve_cli.interrupts import Interrupts
from encserve_cli.shared import errors_in_one_line, one_line
from encserve_server.__main__ import exit_process, run
from encserve_server.app import App, serve
from encserve_server.engine.opening import check_installed
from encserve_server.errors import EngineMissing, StartupError
from encserve_server.greeting import greeting
from encserve_server.settings import Settings
from encserve_server.system.descriptors import open_standard_descriptors

logger = logging.getLogger(__name__)

_STOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class _Served:
    """A model to serve.

    Attributes:
        model: The model.
        alias: Another name of the model, from NAME=MODEL; empty for none.
    """

    model: Model
    alias: str

    @property
    def reference(self) -> str:
        """The value of --model of `encserve-server` for this model: NAME, or NAME@VERSION."""
        its = self.model
        return f"{its.name}@{its.folder.name}" if isinstance(its, BundleFolder) and its.is_pinned else its.name


def run_server(
    given: Sequence[str],
    options: ExportOptions,
    read_settings: Callable[[Mapping[str, Any]], Settings],
    values: Mapping[str, Any],
) -> None:
    """Serve models, and end the process.

    Args:
        given: The arguments MODEL. If empty, `values` name a model repository.
        options: The options of exports.
        read_settings: Returns the settings of the server for the values of its flags.
        values: The values of the flags of the server.

    Raises:
        ClickException: An argument or a setting is wrong, or the engine is not installed.
    """
    open_standard_descriptors()
    with errors_in_one_line():
        models = [_Served(*_read(argument)) for argument in given]
    _check_names(models)
    repository = _common_repository(models)
    with contextlib.ExitStack() as stack:
        links = None
        if models and repository is None:
            with errors_in_one_line():
                links = repository = stack.enter_context(links_folder())
        if models:
            aliases = [f"{it.alias}={it.reference}" for it in models if it.alias]
            values = dict(values) | {
                "model_repository": repository,
                "model": tuple(it.reference for it in models),
                "served_model_name": (*values["served_model_name"], *aliases),
            }
        settings = read_settings(values)
        _check_engine(settings)
        make = None if links is None else partial(_prepare, models, options, links)
        status = run(settings, partial(serve, prepare=make, on_serving=_greet))
    exit_process(status)


def _check_engine(settings: Settings) -> None:
    """Check that the engine is installed, before a model is downloaded and exported.

    Raises:
        ClickException: A package is missing. The text names the extra.
    """
    if settings.engine == "onnxruntime":
        with needs("encserve serve", "cpu", click.ClickException):
            import onnxruntime  # noqa: F401
    try:
        check_installed(settings.engine)
    except EngineMissing as error:
        raise click.ClickException(str(error)) from error


def _read(argument: str) -> tuple[Model, str]:
    """Return a model and its alias. An exported model needs no alias, because it is exported under the given name."""
    name, given = split_name(argument)
    model = read_model(given, name)
    is_exported = isinstance(model, Checkpoint | HubModel)
    return model, "" if is_exported or name in (None, model.name) else str(name)


def _check_names(models: Sequence[_Served]) -> None:
    """Refuse two models with the same name. Versions of one folder are allowed if each argument names the version.

    Raises:
        UsageError: Two models have the same name.
    """
    versions: dict[str, list[Path | None]] = {}  # None for a model without a named version
    for model in (it.model for it in models):
        named = model.folder.absolute() if isinstance(model, BundleFolder) and model.is_pinned else None
        others = versions.setdefault(model.name, [])
        if any(it is None or named is None or it == named or it.parent != named.parent for it in others):
            raise click.UsageError(f"two models are named {model.name}; {_advice(models, model.name)}")
        others.append(named)


def _advice(models: Sequence[_Served], name: str) -> str:
    """Return what the user can do if several models have this name."""
    same = [it.model for it in models if it.model.name == name]
    if any(isinstance(it, Checkpoint | HubModel) for it in same):
        return "give the checkpoint another name, as NAME=MODEL"
    for model in reversed(same):
        if isinstance(model, BundleFolder):
            return f"rename one with `encserve bundle rename {model.folder} --name NAME`"
    return "copy one with `encserve pull URI --to DIR`, and rename the copy with `encserve bundle rename`"


def _common_repository(models: Sequence[_Served]) -> Path | None:
    """Return the model repository that has all models, or None."""
    found = {it.model.repository if isinstance(it.model, BundleFolder) else None for it in models}
    return found.pop() if len(found) == 1 else None


class _ServeWork:
    """A `Work` that reports the stage to callers of the server. On a terminal, a bar also shows the stage."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` receives the stage. The server reports the stage to callers that come too early."""
        self.stopped = threading.Event()
        self.shown = ShownWork() if sys.stderr.isatty() else None
        self._tell = tell

    def stage(self, text: str, fraction: float | None = None) -> None:
        """See `Work`."""
        if self.stopped.is_set():
            raise Stopped
        self._tell(text)
        if self.shown is not None:
            self.shown.stage(text, fraction)

    def note(self, line: str) -> None:
        """See `Work`."""
        if self.shown is not None:
            self.shown.note(line)
        else:
            logger.info(line)

    def detail(self, line: str) -> None:
        """See `Work`."""
        logger.debug(line)


async def _prepare(models: Sequence[_Served], options: ExportOptions, links: Path, tell: Callable[[str], None]) -> None:
    """Make the bundles of models, and link them into a folder, which is the server's model repository.

    Raises:
        StartupError: A bundle cannot be made.
    """
    work = _ServeWork(tell)

    def make() -> None:
        for served in models:
            bundle = prepare(served.model, options, work).absolute()
            link = links / served.model.name
            if not link.is_symlink():  # another version in the same folder may have made the link
                link.symlink_to(bundle.parent, target_is_directory=True)

    making = _in_thread(make)
    try:
        await asyncio.shield(making)
    except asyncio.CancelledError:
        work.stopped.set()
        await asyncio.wait((making,), timeout=_STOP_SECONDS)
        Interrupts.current().clean()
        if making.done():
            making.exception()  # otherwise asyncio logs the exception
        raise
    except (ValueError, OSError, RuntimeError, hub.HubError) as error:
        raise StartupError(one_line(error)) from error
    finally:
        if work.shown is not None:
            work.shown.erase()


def _in_thread(make: Callable[[], None]) -> "asyncio.Future[None]":
    """Run a function in a daemon thread. So the process can end even if a download hangs."""
    loop, context = asyncio.get_running_loop(), click.get_current_context()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            with context.scope(cleanup=False):  # `Interrupts.cleanup` needs the context of the command
                make()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return ended


def _greet(app: App) -> None:
    lines = greeting(
        app.settings,
        app.catalog.all(),
        grpc_port=app.grpc_port,
        http_port=app.http_port,
        metrics_port=app.metrics_port,
    )
    click.echo("\n".join(lines))
