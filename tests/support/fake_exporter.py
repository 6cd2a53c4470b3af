"""A fake of the package encserve_export. The fake copies a finished bundle and exports nothing."""

import os
from pathlib import Path

from tiny_bundle import write_bundle

_MAIN = """
import argparse, pathlib, shutil, sys

def main(**_):
    parser = argparse.ArgumentParser()
    for name in ("verb", "source", "--revision", "--model-repository", "--name", "--version"):
        parser.add_argument(name)
    given, more = parser.parse_known_args()
    with open({log!r}, "a") as log:
        log.write(" ".join([given.source, given.name, *more]) + "\\n")
    print("reading the weights …", file=sys.stderr)
    print("the report")
    if given.source.endswith("/broken"):
        sys.exit("Usage: encserve-export\\nError: the weights are broken")
    path = pathlib.Path(given.name, given.version)
    shutil.copytree(pathlib.Path({ready!r}) / path, pathlib.Path(given.model_repository) / path)
"""


class FakeExporter:
    """A folder with the fake package.

    Attributes:
        ready: The model repository of the bundles that the fake copies. The bundles are my-encoder/1 and my-encoder/2.
        python_path: The value of PYTHONPATH for a process that exports with the fake.
    """

    def __init__(self, folder: Path) -> None:
        """Write the package into a folder."""
        package, self._log, self.ready = folder / "encserve_export", folder / "log", folder / "ready"
        package.mkdir(parents=True)
        for version in ("1", "2"):
            write_bundle(self.ready, "my-encoder", version)
        (package / "__init__.py").touch()
        (package / "cli.py").write_text(_MAIN.format(log=str(self._log), ready=str(self.ready)))
        self._log.touch()
        others = os.environ.get("PYTHONPATH")  # Python reads an empty entry as the current folder
        self.python_path = os.pathsep.join([str(folder), others] if others else [str(folder)])

    def runs(self) -> list[str]:
        """Return the exports so far, each as "SOURCE NAME OPTION…"."""
        return self._log.read_text().splitlines()
