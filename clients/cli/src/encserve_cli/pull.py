"""The command `encserve pull`."""

from pathlib import Path
from typing import Any

import click

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
    NAME=MODEL sets the name. `encserve serve DIR/NAME` then needs no network and no PyTorch.
    """
    from encserve import hub
    from encserve_cli.bundles.argument import read_model, split_name
    from encserve_cli.bundles.finding import pull as pull_bundle
    from encserve_cli.bundles.work import shown_work

    options = take_options(values)
    name, given = split_name(model)
    with errors_in_one_line(RuntimeError, hub.HubError):
        with shown_work() as work:
            bundle = pull_bundle(read_model(given, name), options, repository, version, work)
        click.echo(str(bundle))
