"""`python -m encserve_cli`: the same as `encserve`."""

from encserve_cli.commands import cli

if __name__ == "__main__":
    cli(prog_name="encserve")
