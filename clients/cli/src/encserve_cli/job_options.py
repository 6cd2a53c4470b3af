"""The options of jobs, and checks of their combinations."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from encserve_cli.shared import SectionOption, check_pooling, with_options

Command = Callable[..., Any]


class _ShardType(click.ParamType[tuple[int, int]]):
    """Converts I/N to two numbers with 0 <= I < N."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parse a value."""
        index, slash, count = str(value).partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            self.fail(f"must be I/N with I from 0 to N-1, for example 0/8; was {value}", param, ctx)
        return int(index), int(count)


_Options = Mapping[str, Mapping[str, Any]]  # flag → arguments of `click.option`
_AT_LEAST_1 = click.IntRange(min=1)
_FOLDER: _Options = {
    "--vectors": {"is_flag": True, "help": "Inputs are lists of vectors, one for each token."},
    "--keep": {
        "multiple": True,
        "metavar": "NAME[:TYPE][,...]",
        "help": "Copy these columns of the inputs into the output; may be repeated. Put a name with a comma into "
        "double quotes. TYPE is string, int64, double or bool. Default: the type in Parquet, string in .csv, and the "
        "type of the first values in .jsonl.",
    },
    "--overwrite": {"is_flag": True, "help": "Remove the output of another job from the folder first."},
    "--add-inputs": {"is_flag": True, "help": "Add the files of --input that the job does not have yet."},
    "--max-rejected": {
        "type": click.IntRange(min=0),
        "metavar": "N",
        "help": "Fail when more than N rows are rejected. Default: no limit.",
    },
    "--shard": {
        "type": _ShardType(),
        "metavar": "I/N",
        "help": "Compute only one of N shares: share I, from 0 to N-1. N commands compute the whole job, for example "
        "in a Slurm array.",
    },
}
# The options of the engine have the same names as in encserve-server.
_BUNDLE: _Options = {
    "--bundle": {
        "metavar": "BUNDLE",
        "help": "Run this model without a server. BUNDLE is a folder NAME/VERSION or NAME, the folder of a checkpoint, "
        "or OWNER/NAME on the hub. Needs encserve[cpu]. Checkpoints also need encserve[export].",
    },
    "--engine": {
        "type": click.Choice(["onnxruntime", "openvino"]),
        "help": "The engine. openvino is for the CPU only. Default: onnxruntime.",
    },
    "--precision": {
        "type": click.Choice(["model", "float32", "bfloat16"]),
        "help": "The number type in which the engine computes. bfloat16 needs --engine openvino and a CPU with "
        "AVX512-BF16 or AMX. Default: the precision of the bundle.",
    },
    "--device": {
        "type": click.Choice(["auto", "cpu", "cuda"]),
        "help": "The device. auto uses CUDA if CUDA can be loaded, otherwise the CPU. Default: auto.",
    },
    "--max-batch-tokens": {
        "type": _AT_LEAST_1,
        "metavar": "N",
        "help": "The largest number of tokens in a batch, padding included. Default: measured when the model is first "
        "loaded.",
    },
    "--intra-op-threads": {
        "type": _AT_LEAST_1,
        "metavar": "N",
        "help": "Threads that run batches on the CPU. Default: the number of CPUs that this process may use.",
    },
    "--parallel-batches": {
        "type": _AT_LEAST_1,
        "metavar": "N",
        "help": "Batches that run at the same time. Default on the CPU: one for each thread, at most 8. Default on "
        "CUDA: 2.",
    },
    "--tokenizer-threads": {"type": _AT_LEAST_1, "metavar": "N", "help": "Threads that tokenize. Default: 2."},
    "--cache-dir": {
        "type": click.Path(file_okay=False, path_type=Path),
        "metavar": "FOLDER",
        "help": "The folder of a cache of weights. All processes of this user share the cache in "
        "memory. off disables the cache. Default: $XDG_CACHE_HOME/encserve or ~/.cache/encserve.",
    },
}
_RAY: _Options = {
    "--ray": {
        "metavar": "ADDRESS",
        "help": "Run --bundle on this cluster. ray://HOST:PORT names a cluster. auto finds a running cluster, as "
        "ray.init does. With local, the command starts a cluster on this machine. Needs ray.",
    },
    "--actors": {
        "type": _AT_LEAST_1,
        "metavar": "N",
        "help": "The number of actors. Default: as many as fit on the current nodes.",
    },
    "--actor-cpus": {"type": click.FloatRange(min=0), "metavar": "N", "help": "CPUs of an actor."},
    "--actor-gpus": {"type": click.FloatRange(min=0), "metavar": "N", "help": "GPUs of an actor."},
}
_SECTIONS = {"Jobs (--output FOLDER/)": _FOLDER, "Without a server": _BUNDLE, "Jobs on a Ray cluster": _RAY}


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


_NAMES = tuple(_name(flag) for options in _SECTIONS.values() for flag in options)


def makes_jobs(command: Command, *, without: Sequence[str] = ()) -> Command:
    """Add the options of jobs to a command, except the options `without`.

    The command gets two mappings from names to values: the given options of jobs, and all other options.
    """

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        # The value of an option that was not given is None, False or ().
        found = {name: options.pop(name) for name in _NAMES if name in options}
        given = {name: its for name, its in found.items() if its is not None and its is not False and its != ()}
        _check(given, options)
        command(given, options)

    return with_options(
        wrapper,
        *(
            click.option(flag, cls=SectionOption, section=title, **settings)
            for title, options in _SECTIONS.items()
            for flag, settings in options.items()
            if flag not in without
        ),
    )


def _check(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that do not go together."""
    check_pooling(options.get("kind"), options.get("pooling"))
    if options["printing"].folder is None:
        problem = "is for jobs: give --output a folder that exists, or a name that ends in /"
        _check_absent(given, (*_FOLDER, *_RAY), problem)
    elif options["sources"].texts:
        raise click.UsageError("a job reads files; give --input FILE instead of TEXT")
    if "bundle" not in given:
        _check_absent(given, (*_BUNDLE, *_RAY), "needs --bundle")
    elif named := [name for name in ("model", "model_version") if options[name] is not None]:
        raise click.UsageError(f"--{named[0].replace('_', '-')} is for a server; --bundle names the model itself")
    if "ray" not in given:
        _check_absent(given, _RAY, "needs --ray")
    if "vectors" in given and options["sources"].ids:
        raise click.UsageError("--vectors and --ids do not go together: give one of them")
    if "overwrite" in given and "add_inputs" in given:
        raise click.UsageError(
            "--overwrite and --add-inputs do not go together: --overwrite begins a new job, and "
            "--add-inputs continues a job"
        )
    if "shard" in given and ("overwrite" in given or "ray" in given):
        raise click.UsageError("--shard does not go together with --overwrite or --ray: leave them out")


def _check_absent(given: Mapping[str, Any], flags: Iterable[str], problem: str) -> None:
    for flag in flags:
        if _name(flag) in given:
            raise click.UsageError(f"{flag} {problem}")
