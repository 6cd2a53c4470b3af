"""Defines the command line: `encserve-export hf`, `checkpoint`, `module`, `onnx` and `init`."""

import functools
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from rich.console import Console
from torch import nn

from encserve import __version__, hub
from encserve_export import report
from encserve_export.bundle.store import check_target, name_from
from encserve_export.bundle.write import Exported, Progress, Target
from encserve_export.core import names
from encserve_export.core.errors import ConfigError, ExportError, printable
from encserve_export.core.precision import Precision
from encserve_export.kinds.spec import POOLING_ALIASES, POOLINGS, spec_from_options
from encserve_export.models.own.config import EncoderConfig, Input
from encserve_export.models.own.layouts import known_layouts
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.onnx_graph.interface import Names
from encserve_export.routes.checkpoint import export_checkpoint, export_init
from encserve_export.routes.export_module import export_module
from encserve_export.routes.hf import ROUTES, Route, export_hf
from encserve_export.routes.onnx import OnnxOptions, export_onnx
from encserve_export.source.tokenizer import TokenizerFile, read_tokenizer

_DEFAULT_VOCAB_SIZE = 32000

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
@click.version_option(__version__, prog_name="encserve-export")
def main() -> None:
    """Export a PyTorch or ONNX encoder as a verified model bundle, NAME/VERSION/ in a model repository."""


def _exports(command: Callable[..., Exported]) -> Callable[..., None]:
    """Turn an export function into a command.

    The export function gets a `target` and a `progress` callback. The decorator adds the options of the target. The
    command prints each step on stderr, and the report on stdout. If the export fails, the command prints the error text
    without a traceback.
    """

    @functools.wraps(command)
    def run(
        model_repository: Path, name: str | None, version: str, overwrite: bool, keep_space_id: str, **given: Any
    ) -> None:
        _raise_on_termination()
        console = Console(stderr=True)
        try:
            target = Target(
                model_repository=model_repository,
                name=name_from(Path(given["source"])) if name is None else name,  # --name is optional for `hf` only
                version=version,
                overwrite=overwrite,
                keep_space_id=keep_space_id,
            )
            # Check the target first, because downloading and tracing a large model take minutes.
            check_target(model_repository, target.name, version, overwrite=overwrite)
            with console.status("starting") as status:

                def progress(step: str) -> None:
                    step = printable(step)
                    console.print(f"{step} …", highlight=False, markup=False, soft_wrap=True)
                    status.update(step)

                exported = command(target=target, progress=progress, **given)
        except (ExportError, hub.HubError) as error:
            raise click.ClickException(printable(str(error))) from error
        report.show(exported, Console())

    for option in (
        click.option(
            "--keep-space-id",
            metavar="ID",
            default="",
            help="Write this space_id instead of the computed space_id. Then an index with this space_id stays usable. "
            "The exporter cannot verify that the vectors fit the index.",
        ),
        click.option("--overwrite", is_flag=True, help="Replace this version if it exists."),
        click.option("--version", default="1", show_default=True, help="The model's version."),
        click.option(
            "--model-repository",
            required=True,
            type=click.Path(file_okay=False, path_type=Path),
            help="The model repository, with each bundle in NAME/VERSION/. encserve-server takes the same directory.",
        ),
    ):
        run = option(run)
    return run


def _max_sequence_tokens_option(described: str, default: int | None = None) -> Callable[[_Command], _Command]:
    text = f"The longest sequence to serve, in tokens. Default: {described}."
    return click.option("--max-sequence-tokens", type=int, default=default, help=text)


_precision_option = click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="float32",
    show_default=True,
    help="The precision of the weights and of the computation: float16 for GPUs, int8 for CPUs.",
)
# The help lists only the names that clients use for poolings. The option also accepts sentence-transformers' names.
_pooling_option = functools.partial(
    click.option,
    "--pooling",
    type=click.Choice([*POOLINGS, *POOLING_ALIASES]),
    metavar=f"[{'|'.join(POOLINGS)}]",
)
_name_option = click.option("--name", required=True, help="The model's name.")
_tokenizer_option = click.option(
    "--tokenizer",
    "tokenizer_path",
    type=_FILE,
    help="A tokenizer.json. Without a tokenizer, the model takes token ids only.",
)
_input_option = click.option(
    "--input",
    "model_input",
    type=click.Choice(get_args(Input)),
    default="token_ids",
    show_default=True,
    help="The model's input: token ids, or one vector per token (embeddings).",
)
_pad_token_id_option = click.option(
    "--pad-token-id", type=int, default=0, show_default=True, help="The token id that pads a batch."
)
_expect_option = click.option(
    "--expect",
    type=_FILE,
    help="A .npz or .safetensors file with three arrays: input_ids (or inputs_embeds), attention_mask, and rows "
    "(the hidden states). The bundle must reproduce these rows.",
)


def _pooling_options(command: _Command) -> _Command:
    for option in (
        click.option("--l2-normalize", is_flag=True, help="Scale pooled vectors to length 1."),
        _pooling_option(help="The pooling that the model was trained with."),
    ):
        command = option(command)
    return command


@main.command()
@click.argument("source", metavar="DIRECTORY|OWNER/NAME")
@_exports
@_precision_option
@click.option("--name", help="The model's name. Default: the name of the directory.")
@click.option("--revision", help="The branch, tag or commit on the hub. Default: the main branch.")
@_max_sequence_tokens_option("max_seq_length of sentence-transformers, or the number of positions")
@click.option(
    "--via",
    type=click.Choice(ROUTES),
    help="The source of the graph: PyTorch's export of the transformers model, or the directory's onnx/model.onnx. "
    "Default: transformers, or the ONNX file if transformers cannot load the model.",
)
@_pooling_option(help="The pooling that the model was trained with, for a directory without modules.json.")
@click.option(
    "--ids-only", is_flag=True, help="Required if the directory has no tokenizer. The model then takes token ids only."
)
@click.option(
    "--ignore-head",
    is_flag=True,
    help="Export the encoder of a classifier or a cross-encoder, without its head.",
)
@_expect_option
def hf(
    source: str, target: Target, progress: Progress, revision: str | None, via: Route | None, **options: Any
) -> Exported:
    """Export the Hugging Face checkpoint in DIRECTORY, or OWNER/NAME on the hub.

    The command supports all encoders of transformers, and models of sentence-transformers with their pooling, prompts
    and heads.
    """
    is_directory = Path(source).is_dir()
    if not is_directory and not hub.is_id(source):
        raise click.UsageError(f"no directory {source}; a model on the hub is OWNER/NAME")
    if is_directory and revision is not None:
        raise click.UsageError(f"--revision is for a model on the hub; {source} is a directory")
    owner = source.partition("/")[0]
    if not is_directory and revision is None and Path(owner).is_dir():  # probably a misspelt directory
        raise ConfigError(
            f"no directory {source}, but a directory {owner}. For the model on the hub, add --revision main"
        )
    origin = None
    if not is_directory:
        progress(f"downloading {source}")
        origin = hub.download(source, revision, with_onnx=via == "onnx")
    directory = Path(source) if origin is None else origin.directory
    return export_hf(directory, target, via=via, origin=origin, progress=progress, **options)


@main.command()
@click.argument("file", type=_FILE)
@_exports
@_precision_option
@_name_option
@click.option(
    "--config",
    "config_path",
    type=_FILE,
    help="A JSON file with the settings that the weights do not show. An error lists the missing settings.",
)
@click.option(
    "--rename",
    metavar="OLD=NEW",
    multiple=True,
    help="Replace OLD by NEW in the names of FILE's weights, for example blocks=layers. May be repeated.",
)
@click.option("--embeddings", "embeddings_path", type=_FILE, help="The embedding table, if FILE has none.")
@_tokenizer_option
@click.option(
    "--layout",
    type=click.Choice(["auto", *known_layouts()]),
    default="auto",
    show_default=True,
    help="The naming scheme of FILE's weights; auto detects the scheme.",
)
@_input_option
@_max_sequence_tokens_option(f"{DEFAULT_LONGEST}, or the rows of the position table")
@_pooling_options
@_expect_option
def checkpoint(
    file: Path,
    target: Target,
    config_path: Path | None,
    rename: tuple[str, ...],
    embeddings_path: Path | None,
    tokenizer_path: Path | None,
    layout: str,
    **options: Any,
) -> Exported:
    """Export the state dict in FILE, a file of safetensors or of torch.save. See --layout for the layouts."""
    return export_checkpoint(
        file,
        target,
        fields=_read_fields(config_path),
        rename=_read_renames(rename),
        embeddings=embeddings_path,
        tokenizer=_read_tokenizer(tokenizer_path),
        layout=None if layout == "auto" else layout,
        **options,
    )


@main.command()
@click.argument("factory", metavar="FILE.py:FACTORY")
@_exports
@_precision_option
@_name_option
@click.option(
    "--config",
    "config_path",
    type=_FILE,
    required=True,
    help="A JSON file with the settings of the module that the weights do not show, such as the activation. The "
    "space_id depends on these settings.",
)
@_tokenizer_option
@_input_option
@click.option("--vocab-size", type=int, help="The number of token ids. Default: the tokenizer's.")
@click.option("--d-model", type=int, help="The dimensions of the embeddings, with --input embeddings.")
@_pad_token_id_option
@_max_sequence_tokens_option(str(DEFAULT_LONGEST), default=DEFAULT_LONGEST)
@_pooling_options
def module(
    factory: str,
    target: Target,
    config_path: Path | None,
    tokenizer_path: Path | None,
    model_input: Input,
    **options: Any,
) -> Exported:
    """Export the PyTorch module that the function FACTORY in FILE.py returns. This runs your code in FILE.py.

    The module is called with token ids, int64 (batch, seq), and a mask, bool (batch, seq). The module returns hidden
    states, float32 (batch, seq, d_model).
    """
    return export_module(
        _make_module(factory),
        target,
        configuration=_read_fields(config_path),
        input=model_input,
        tokenizer=_read_tokenizer(tokenizer_path),
        **options,
    )


@main.command()
@click.argument("file", type=_FILE)
@_exports
@_name_option
@_tokenizer_option
@_max_sequence_tokens_option(f"{DEFAULT_LONGEST}. The export runs a sequence of this length", default=DEFAULT_LONGEST)
@_pad_token_id_option
@click.option("--vocab-size", type=int, help="The number of token ids. Default: the rows of the embedding table.")
@_pooling_options
@_expect_option
@click.option("--input-ids-name", default=names.INPUT_IDS, show_default=True, help="FILE's input for token ids.")
@click.option("--attention-mask-name", default=names.ATTENTION_MASK, show_default=True, help="FILE's attention mask.")
@click.option("--token-type-ids-name", help="FILE's input for token types, filled with zeros. Default: token_type_ids.")
@click.option("--output-name", help="FILE's output of hidden states. Default: its only output, or last_hidden_state.")
def onnx(
    file: Path,
    target: Target,
    progress: Progress,
    tokenizer_path: Path | None,
    pooling: str | None,
    l2_normalize: bool,
    expect: Path | None,
    input_ids_name: str,
    attention_mask_name: str,
    token_type_ids_name: str | None,
    output_name: str | None,
    **options: Any,
) -> Exported:
    """Export the encoder in the ONNX file FILE.

    The model's inputs are token ids and a mask, int64 (batch, seq). The model's output is hidden states, float32
    (batch, seq, d_model).
    """
    given = OnnxOptions(
        names=Names(
            input_ids=input_ids_name,
            attention_mask=attention_mask_name,
            token_type_ids=token_type_ids_name,
            output=output_name,
        ),
        vector=spec_from_options(pooling, l2_normalize=l2_normalize),
        tokenizer=_read_tokenizer(tokenizer_path),
        **options,
    )
    return export_onnx(file, target, given, expect=expect, progress=progress)


@main.command()
@_exports
@_precision_option
@_name_option
@click.option("--config", "config_path", type=_FILE, help="JSON with the sizes and settings of the encoder.")
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of the weights.")
@_tokenizer_option
@_pooling_options
def init(target: Target, config_path: Path | None, seed: int, tokenizer_path: Path | None, **options: Any) -> Exported:
    """Export an encoder with random weights, to measure its speed and memory. Default: 8 layers, d_model 512.

    The vocabulary size is vocab_size in --config. The default is the tokenizer's size, or 32000 without a tokenizer.
    """
    tokenizer = _read_tokenizer(tokenizer_path)
    fields = _read_fields(config_path)
    if fields.get("input") != "embeddings":
        vocab_size = _DEFAULT_VOCAB_SIZE if tokenizer is None else tokenizer.largest_id + 1
        fields = {"vocab_size": vocab_size, **fields}
    return export_init(EncoderConfig.from_mapping(fields), seed, target, tokenizer=tokenizer, **options)


def _read_tokenizer(path: Path | None) -> TokenizerFile | None:
    return None if path is None else read_tokenizer(path)


def _read_fields(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} must hold a JSON object of settings; was {type(fields).__name__}")
    return fields


def _read_renames(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [rename.partition("=") for rename in given]
    if not all(old and new for old, _, new in pairs):
        raise click.UsageError(f"--rename must be OLD=NEW; was {', '.join(given)}")
    return {old: new for old, _, new in pairs}


def _make_module(factory: str) -> nn.Module:
    """Import FILE.py, and return the module that its function FACTORY returns."""
    file, _, function = factory.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise click.UsageError(f"give FILE.py:FACTORY with an existing Python file; was {factory!r}")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None  # noqa: S101 - every .py file has a specification
    assert specification.loader is not None  # noqa: S101
    imported = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = imported  # as `import` does: dataclasses look up their module in sys.modules
    sys.path.insert(0, str(path.resolve().parent))  # then FILE.py can import files of its folder, like a script
    specification.loader.exec_module(imported)
    if not hasattr(imported, function):
        raise click.UsageError(f"{path} defines no {function}")
    made = getattr(imported, function)()
    if not isinstance(made, nn.Module):
        raise click.UsageError(f"{function}() in {path} must return a torch.nn.Module; was {type(made).__name__}")
    return made


def _raise_on_termination() -> None:
    """Make SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that the export removes the unfinished bundle."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP stays ignored
            signal.signal(number, leave)
