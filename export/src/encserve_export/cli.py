"""The command line: `encserve-export hf`, `checkpoint`, `onnx`, `init` and `inspect`."""

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from rich.console import Console

from encserve_export import report
from encserve_export.bundle.propagation import measure, read_sequence
from encserve_export.bundle.read import read_bundle
from encserve_export.bundle.store import check_target, name_from
from encserve_export.bundle.write import Exported, Progress, Target
from encserve_export.ground import names
from encserve_export.ground.errors import ConfigError, ExportError, printable
from encserve_export.ground.precision import Precision
from encserve_export.kinds.spec import POOLING_ALIASES, POOLINGS, spec_from_options
from encserve_export.models.own.config import EncoderConfig, Input
from encserve_export.models.own.layouts import known_layouts
from encserve_export.models.own.state_dict import DEFAULT_LONGEST
from encserve_export.onnx_graph.foreign import Names
from encserve_export.routes.checkpoint import export_checkpoint, export_init
from encserve_export.routes.hf import ROUTES, Route, export_hf
from encserve_export.routes.onnx import OnnxOptions, export_onnx
from encserve_export.source import hub
from encserve_export.source.tokenizer import TokenizerFile, read_tokenizer

_DEFAULT_VOCAB_SIZE = 32000

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
@click.version_option(package_name="encserve-export")
def main() -> None:
    """Turns a PyTorch encoder into a verified model bundle, NAME/VERSION/ in a model repository."""


def _exports(command: Callable[..., Exported]) -> Callable[..., None]:
    """Makes a command of a function that exports to a `target` and tells `progress` what is being done.

    The command has the options of the target, shows what is being done on stderr, and the result on stdout.
    """

    @functools.wraps(command)
    def run(
        model_repository: Path, name: str | None, version: str, overwrite: bool, keep_space_id: str, **given: Any
    ) -> None:
        _end_by_exception()
        console = Console(stderr=True)
        try:
            target = Target(
                model_repository=model_repository,
                name=name_from(Path(given["source"])) if name is None else name,  # None for `hf` alone
                version=version,
                overwrite=overwrite,
                keep_space_id=keep_space_id,
            )
            with console.status("starting") as status:

                def progress(step: str) -> None:
                    step = printable(step)
                    console.print(f"{step} …", highlight=False, markup=False, soft_wrap=True)
                    status.update(step)

                exported = command(target=target, progress=progress, **given)
        except ExportError as error:
            raise click.ClickException(str(error)) from error
        report.show(exported, Console())

    for option in (
        click.option(
            "--keep-space-id",
            metavar="ID",
            default="",
            help="The space_id to write, for an index of vectors from an older bundle of the same model; by default "
            "the model's own. It is not checked.",
        ),
        click.option("--overwrite", is_flag=True, help="Replace this version if it is there."),
        click.option("--version", default="1", show_default=True, help="The model's version."),
        click.option(
            "--model-repository",
            required=True,
            type=click.Path(file_okay=False, path_type=Path),
            help="Directory of model bundles, NAME/VERSION/ in it, as encserve-server takes it.",
        ),
    ):
        run = option(run)
    return run


def _max_sequence_tokens_option(usually: str, default: int | None = None) -> Callable[[_Command], _Command]:
    """The option that says the longest sequence, with its default in words."""
    text = f"The longest sequence to serve, in tokens; by default {usually}."
    return click.option("--max-sequence-tokens", type=int, default=default, help=text)


_precision_option = click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="float32",
    show_default=True,
    help="What the bundle computes in: float16 for GPUs, int8 for CPUs.",
)


# By the clients' names; sentence-transformers' are taken too.
_pooling_option = functools.partial(
    click.option,
    "--pooling",
    type=click.Choice([*POOLINGS, *POOLING_ALIASES]),
    metavar=f"[{'|'.join(POOLINGS)}]",
)


def _pooling_options(command: _Command) -> _Command:
    """The options that say how the model was trained to make one vector."""
    for option in (
        click.option("--l2-normalize", is_flag=True, help="Scale pooled vectors to length 1."),
        _pooling_option(help="How the model was trained to make one vector."),
    ):
        command = option(command)
    return command


_expect_option = click.option(
    "--expect",
    type=_FILE,
    help="A .npz or .safetensors file of rows that your own module made, which the bundle must give: input_ids or "
    "inputs_embeds, attention_mask, rows.",
)


@main.command()
@click.argument("source", metavar="DIRECTORY|OWNER/NAME")
@_exports
@_precision_option
@click.option("--name", help="The model's name; by default the directory's own.")
@click.option("--revision", help="The hub's branch, tag or commit; by default the main branch.")
@_max_sequence_tokens_option("the max_seq_length of sentence-transformers, or as many as there are positions")
@click.option(
    "--via",
    type=click.Choice(ROUTES),
    help="How the graph is made: our own encoder, the directory's onnx/model.onnx, or PyTorch's export of the model in "
    "transformers; by default the first of them that takes it.",
)
@_pooling_option(
    help="How the model was trained to make one vector, where the directory has no modules.json to say so."
)
@click.option(
    "--ids-only",
    is_flag=True,
    help="Export a directory without a tokenizer: the model takes token ids and no text.",
)
@click.option(
    "--ignore-head",
    is_flag=True,
    help="Export the encoder of a classifier or a cross-encoder, without its head.",
)
@_expect_option
def hf(
    source: str,
    target: Target,
    progress: Progress,
    max_sequence_tokens: int | None,
    precision: Precision,
    revision: str | None,
    via: Route | None,
    pooling: str | None,
    ids_only: bool,
    ignore_head: bool,
    expect: Path | None,
) -> Exported:
    """Exports the Hugging Face checkpoint in DIRECTORY, or the one of that name on the hub.

    BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, NomicBERT, GTE and ModernBERT can be run by our own encoder;
    every other encoder that transformers knows is exported from transformers.
    """
    is_directory = Path(source).is_dir()
    if not is_directory and not hub.is_id(source):
        raise click.UsageError(f"there is no directory {source}; a model of the hub is named OWNER/NAME")
    if is_directory and revision is not None:
        raise click.UsageError(f"--revision is of the hub; {source} is a directory")
    # A large checkpoint is downloaded and traced for minutes before the draft would say so.
    check_target(target.model_repository, target.name, target.version, overwrite=target.overwrite)
    origin = None
    if not is_directory:
        progress(f"downloading {source}")
        origin = hub.download(source, revision, with_onnx=via == "onnx")
    return export_hf(
        Path(source) if origin is None else origin.directory,
        target,
        max_sequence_tokens=max_sequence_tokens,
        precision=precision,
        via=via,
        pooling=pooling,
        ids_only=ids_only,
        ignore_head=ignore_head,
        expect=expect,
        origin=origin,
        progress=progress,
    )


@main.command()
@click.argument("file", type=_FILE)
@_exports
@_precision_option
@click.option("--name", required=True, help="The model's name.")
@click.option("--config", "config_path", type=_FILE, help="JSON of what the weights do not tell; an error lists it.")
@click.option("--embeddings", "embeddings_path", type=_FILE, help="The embedding table, where FILE has none.")
@click.option("--tokenizer", "tokenizer_path", type=_FILE, help="A tokenizer.json; without one, token ids only.")
@click.option(
    "--layout",
    type=click.Choice(["auto", *known_layouts()]),
    default="auto",
    show_default=True,
    help="How FILE names its weights; auto recognises it.",
)
@click.option(
    "--input",
    "model_input",
    type=click.Choice(get_args(Input)),
    default="token_ids",
    show_default=True,
    help="What callers send: token ids (and text), or embeddings, one vector per token, which need no table.",
)
@_max_sequence_tokens_option(f"{DEFAULT_LONGEST}, or as many as a position table has rows")
@_pooling_options
@_expect_option
def checkpoint(
    file: Path,
    target: Target,
    config_path: Path | None,
    embeddings_path: Path | None,
    tokenizer_path: Path | None,
    layout: str,
    **options: Any,
) -> Exported:
    """Exports the state dict in FILE, safetensors or a PyTorch file of tensors, in one of the layouts of --layout."""
    return export_checkpoint(
        file,
        target,
        fields={} if config_path is None else _read_fields(config_path),
        embeddings=embeddings_path,
        tokenizer=_read_tokenizer(tokenizer_path),
        layout=None if layout == "auto" else layout,
        **options,
    )


@main.command()
@click.argument("file", type=_FILE)
@_exports
@click.option("--name", required=True, help="The model's name.")
@click.option("--tokenizer", "tokenizer_path", type=_FILE, help="A tokenizer.json; without one, token ids only.")
@_max_sequence_tokens_option(f"{DEFAULT_LONGEST}; it is tried", default=DEFAULT_LONGEST)
@click.option("--pad-token-id", type=int, default=0, show_default=True, help="The id that fills a padded batch.")
@click.option("--vocab-size", type=int, help="How many token ids there are; by default as many as FILE has rows for.")
@_pooling_options
@_expect_option
@click.option("--input-ids-name", default=names.INPUT_IDS, show_default=True, help="FILE's input of token ids.")
@click.option("--attention-mask-name", default=names.ATTENTION_MASK, show_default=True, help="FILE's attention mask.")
@click.option("--token-type-ids-name", help="FILE's input to fill with zeros, where not token_type_ids.")
@click.option("--output-name", help="FILE's output of rows; by default the only one, or last_hidden_state.")
def onnx(
    file: Path,
    target: Target,
    progress: Progress,
    tokenizer_path: Path | None,
    max_sequence_tokens: int,
    pad_token_id: int,
    vocab_size: int | None,
    pooling: str | None,
    l2_normalize: bool,
    expect: Path | None,
    input_ids_name: str,
    attention_mask_name: str,
    token_type_ids_name: str | None,
    output_name: str | None,
) -> Exported:
    """Exports the encoder in FILE, which is ONNX already.

    Its inputs are ids and mask, int64 (batch, seq), its output is float32 (batch, seq, d_model).
    """
    options = OnnxOptions(
        names=Names(
            input_ids=input_ids_name,
            attention_mask=attention_mask_name,
            token_type_ids=token_type_ids_name,
            output=output_name,
        ),
        max_sequence_tokens=max_sequence_tokens,
        pad_token_id=pad_token_id,
        vocab_size=vocab_size,
        vector=spec_from_options(pooling, l2_normalize=l2_normalize),
        tokenizer=_read_tokenizer(tokenizer_path),
    )
    return export_onnx(file, target, options, expect=expect, progress=progress)


@main.command()
@_exports
@_precision_option
@click.option("--name", required=True, help="The model's name.")
@click.option("--config", "config_path", type=_FILE, help="JSON of the encoder's sizes and choices.")
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes the weights.")
@click.option("--tokenizer", "tokenizer_path", type=_FILE, help="A tokenizer.json; without one, token ids only.")
@_pooling_options
def init(target: Target, config_path: Path | None, seed: int, tokenizer_path: Path | None, **options: Any) -> Exported:
    """Exports an encoder with random weights, to try sizes: 8 layers of d_model 512 by default.

    The vocabulary is the tokenizer's, or 32000 token ids, unless the configuration gives a vocab_size.
    """
    tokenizer = _read_tokenizer(tokenizer_path)
    return export_init(_read_config(config_path, tokenizer), seed, target, tokenizer=tokenizer, **options)


@main.command()
@click.argument("bundle", type=_DIRECTORY)
@click.option("--text", help="The text to run; needs the bundle's tokenizer.")
@click.option("--ids", metavar="ID,ID,...", help="The token ids to run.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="How many tokens to run where neither is given; always the same ones.",
)
def inspect(bundle: Path, text: str | None, ids: str | None, tokens: int) -> None:
    """Shows the parameters of the bundle in the folder BUNDLE, and how the signal fares through its layers."""
    console = Console()
    try:
        found = read_bundle(bundle)
        report.show_bundle(found, console)
        if not found.manifest.HasField("inspect_graph"):
            console.print("No signal propagation: this bundle has no graph for inspections.")
            return
        sequence = read_sequence(found, text, ids, tokens)
        shown = f"text {text!r}" if text is not None else "the given ids" if ids is not None else "random tokens"
        console.print()
        report.show_propagation(measure(found, sequence), f"{len(sequence)} tokens of {shown}", console)
    except ExportError as error:
        raise click.ClickException(str(error)) from error


def _read_tokenizer(path: Path | None) -> TokenizerFile | None:
    return None if path is None else read_tokenizer(path)


def _read_config(path: Path | None, tokenizer: TokenizerFile | None) -> EncoderConfig:
    vocab_size = _DEFAULT_VOCAB_SIZE if tokenizer is None else tokenizer.largest_id + 1
    fields = {} if path is None else _read_fields(path)
    if fields.get("input") != "embeddings":
        fields = {"vocab_size": vocab_size, **fields}
    return EncoderConfig.from_mapping(fields)


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} must hold an object of configuration fields")
    return given


def _end_by_exception() -> None:
    """Has a signal that ends the process leave by way of an exception, as Ctrl-C does: nothing half written stays."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, leave)
