"""`encserve bundle`: renames a bundle, and copies a bundle into another model repository."""

from pathlib import Path

import click

from encserve_cli.shared import errors_in_one_line

_SOURCE = click.argument("source", type=click.Path(path_type=Path), metavar="BUNDLE")


@click.group(short_help="Rename a bundle, or copy it to a repository.")
def bundle() -> None:
    """Rename a bundle, or copy a bundle into another model repository.

    BUNDLE is a folder NAME/VERSION. For a folder NAME the newest version is used. The commands also change the name
    and the version in the manifest. They verify all files before and after, and never overwrite a bundle. The
    fingerprint and the space id of the model stay the same.
    """


@bundle.command(short_help="Give BUNDLE another name or version.")
@_SOURCE
@click.option("--name", default="", help="The new name. Default: the same name.")
@click.option("--version", default="", help="The new version. Default: the same version.")
def rename(source: Path, name: str, version: str) -> None:
    """Give BUNDLE another name or version in its model repository.

    A server that follows the repository loads the bundle under the new name or version. If no
    other version has the old name, the server continues to serve the old name until the server ends.

    If BUNDLE was copied or renamed by hand, give the name and the version of its folder. The command then corrects only
    the manifest.
    """
    if not name and not version:
        raise click.UsageError("give --name, --version or both")
    from encserve_server.errors import BundleError
    from encserve_server.repository.moving import rename_bundle

    with errors_in_one_line(BundleError):
        click.echo(rename_bundle(source, name=name, version=version))


@bundle.command(short_help="Copy BUNDLE into another model repository.")
@_SOURCE
@click.option(
    "--to",
    "repository",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The model repository of the copy. A missing folder is created.",
)
@click.option("--name", default="", help="The name of the copy. Default: the same name.")
@click.option("--version", default="", help="The version of the copy. Default: the same version.")
def promote(source: Path, repository: Path, name: str, version: str) -> None:
    """Copy BUNDLE into another model repository, such as the repository of production."""
    from encserve_server.errors import BundleError
    from encserve_server.repository.moving import copy_bundle

    with errors_in_one_line(BundleError):
        click.echo(copy_bundle(source, repository, name=name, version=version))
