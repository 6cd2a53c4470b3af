"""The options of exports, for `serve` and `pull`."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from encserve_cli.bundles.exporting import ExportOptions, ExportPrecision
from encserve_cli.shared import with_options

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = ("pooling", "max_sequence_tokens", "ignore_head", "ids_only")


def makes_bundles(command: F, precision_flag: str = "--precision") -> F:
    """Add the options of exports. `take_options` reads them.

    `precision_flag` is the flag of the precision. The flag of `serve` is --export-precision, because --precision of
    `serve` is a setting of the server.
    """
    return with_options(
        command,
        click.option(
            precision_flag,
            "export_precision",
            type=click.Choice(get_args(ExportPrecision)),
            default="float32",
            show_default=True,
            help="The precision of an exported bundle: float16 for GPUs, int8 for CPUs.",
        ),
        click.option(
            "--pooling",
            metavar="NAME",
            help="The pooling of the model, if the files of the model do not name one: mean, cls, last_token, …",
        ),
        click.option(
            "--max-sequence-tokens",
            type=click.IntRange(min=1),
            metavar="N",
            help="The longest sequence of an exported bundle, in tokens. Default: the limit in the files of the model.",
        ),
        click.option(
            "--ignore-head",
            is_flag=True,
            help="Export the encoder of a classifier or a cross-encoder, without its head.",
        ),
        click.option(
            "--ids-only",
            is_flag=True,
            help="For a checkpoint that has no tokenizer. The exported model takes token ids only.",
        ),
    )


def take_options(values: dict[str, Any]) -> ExportOptions:
    """Return the options of exports, and remove these options from `values`."""
    return ExportOptions(values.pop("export_precision"), **{name: values.pop(name) for name in _NAMES})
