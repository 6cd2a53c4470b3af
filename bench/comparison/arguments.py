"""What the comparisons take on the command line."""

import argparse
from pathlib import Path


def common_parser(description: str | None, checkpoint_for: str, *, needs_checkpoint: bool) -> argparse.ArgumentParser:
    """A parser of what all of them take; `checkpoint_for` says who needs the model's own directory."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME or NAME@VERSION; the first one without it")
    checkpoint_help = f"the model's own directory, for {checkpoint_for}"
    parser.add_argument("--checkpoint", type=Path, required=needs_checkpoint, help=checkpoint_help)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="SECONDS",
        help="how much longer to take, in all, for running again what others disturbed",
    )
    parser.add_argument("--server-flags", default="", help="further flags of encserve-server, in one string")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")
    return parser
