"""The command `encserve pull`."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from encserve_cli.export_options import makes_bundles, take_options
from encserve_cli.shared import SectionCommand, errors_in_one_line


@click.command(cls=SectionCommand)
@click.argument("model", metavar="MODEL")
@click.option(
    "--to",
    "repository",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The model repository. The bundle becomes DIR/NAME/VERSION.",
)
@click.option("--version", default="1", show_default=True, help="The version of the model.")
@makes_bundles
def pull(model: str, repository: Path, version: str, **values: Any) -> None:
    """Download and export MODEL, and write the bundle into DIR.

    MODEL is OWNER/NAME or OWNER/NAME@REVISION on the hub, the directory of a checkpoint, or the URI of a bundle.
    NAME=MODEL sets the name of an exported model. A bundle from a URI keeps its name and its version. `encserve serve
    DIR/NAME` then needs no network and no PyTorch.
    """
    from encserve import hub
    from encserve_cli.bundles.argument import is_uri, read_model, split_name
    from encserve_cli.bundles.finding import pull as pull_bundle
    from encserve_cli.bundles.work import shown_work

    options = take_options(values)
    name, given = split_name(model)
    with errors_in_one_line(RuntimeError, hub.HubError):
        if is_uri(given):
            _check_unchanged(name)
        with shown_work() as work:
            bundle = pull_bundle(read_model(given, name), options, repository, version, work)
        click.echo(str(bundle))


def _check_unchanged(name: str | None) -> None:
    """Refuse the options of exports for a URI, which names a finished bundle.

    Raises:
        UsageError: A name, a version or an option of exports is given.
    """
    context = click.get_current_context()
    exports = [it for it in context.command.params if it.name not in ("model", "repository")]
    given = [it.opts[0] for it in exports if context.get_parameter_source(str(it.name)) != ParameterSource.DEFAULT]
    if name is not None:
        given.insert(0, f"{name}=")
    if given:
        raise click.UsageError(
            f"{', '.join(given)}: a URI names a finished bundle, which `pull` only copies. Leave these out; `encserve "
            "bundle rename` changes the name and the version of the copy"
        )
