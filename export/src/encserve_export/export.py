"""The exports through our own encoder: state dict, or random weights -> verified bundle."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from encserve_export import bundle, graph, manifest, verify
from encserve_export.checkpoint import Table, find_encoder
from encserve_export.config import EncoderConfig, Input
from encserve_export.encoder import Encoder
from encserve_export.errors import TokenizerError
from encserve_export.head import write_head, write_multi_vector, write_sparse
from encserve_export.init import random_encoder
from encserve_export.manifest import Source
from encserve_export.precision import Precision
from encserve_export.sentence_transformers import SentenceVector
from encserve_export.space import digest_encoder, digest_model
from encserve_export.text import TokenizerFile
from encserve_export.weights import read_checkpoint, read_table
from encserve_proto.bundle.v1 import manifest_pb2

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where a bundle goes.

    Attributes:
        model_repository: The folder of all models.
        name: The model's name.
        version: The model's version.
        overwrite: Whether a version that is there is replaced.
    """

    model_repository: Path
    name: str
    version: str = "1"
    overwrite: bool = False


@dataclasses.dataclass(frozen=True)
class Exported:
    """A bundle that was written.

    Attributes:
        path: Its folder.
        manifest: What its manifest.json says.
        remark: What was decided on the way and may surprise, for people; empty where nothing was.
        route: How `hf` made the graph, and why so, for people; empty for the other commands.
        text: Why it takes no text, where it does not, and what would help.
        left_behind: The parts of the checkpoint that make no rows, such as heads; not known of ONNX files.
    """

    path: Path
    manifest: manifest_pb2.Manifest
    remark: str = ""
    route: str = ""
    text: str = ""
    left_behind: tuple[str, ...] = ()


def export_checkpoint(
    path: Path,
    target: Target,
    *,
    fields: Mapping[str, Any] | None = None,
    embeddings: Path | None = None,
    tokenizer: TokenizerFile | None = None,
    layout: str | None = None,
    model_input: Input = "token_ids",
    max_sequence_tokens: int | None = None,
    precision: Precision = "float32",
    progress: Progress = lambda _: None,
) -> Exported:
    """Exports a bare state dict in one of the layouts of `known_layouts`.

    Args:
        path: The file: safetensors, or a pickle of tensors, bare or under one of the usual keys.
        target: Where the bundle goes.
        fields: Fields of EncoderConfig; what the weights do not tell has to be among them.
        embeddings: The file with the table of token embeddings, where `path` has none.
        tokenizer: What turns text into ids; without one the model takes token ids only.
        layout: The layout's name; without one it is recognised.
        model_input: What the model is to take; for "embeddings" no table of them is needed.
        max_sequence_tokens: The longest sequence to serve, in tokens; by default 512, or as far as a table reaches.
        precision: What the bundle computes in.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    progress("reading the weights")
    weights = read_checkpoint(path, embeddings)
    table = None if embeddings is None else Table(*read_table(embeddings))
    found = find_encoder(
        weights.tensors,
        fields or {},
        embeddings=table,
        layout=layout,
        model_input=model_input,
        max_sequence_tokens=max_sequence_tokens,
    )
    for remark in (f"the layout is {found.layout}", *found.remarks):
        progress(remark)
    tensors = weights.tensors if table is None else {**weights.tensors, table.name: table.values}
    digest = digest_model(tensors, found.encoder.config)
    source = Source("checkpoint", found.layout, weights.sha256, tokenizer=tokenizer, model_digest=digest)
    return export_encoder(found.encoder, source, target, precision=precision, progress=progress)


def export_init(
    config: EncoderConfig,
    seed: int,
    target: Target,
    *,
    tokenizer: TokenizerFile | None = None,
    precision: Precision = "float32",
    progress: Progress = lambda _: None,
) -> Exported:
    """Exports an encoder with random weights.

    Args:
        config: The encoder's sizes and choices.
        seed: Fixes the weights.
        target: Where the bundle goes.
        tokenizer: What turns text into ids; without one the model takes token ids only.
        precision: What the bundle computes in.
        progress: Called with what is being done.

    Raises:
        ExportError: One of its kinds, by cause. Nothing is left on the disk.
    """
    progress("making the weights")
    source = Source("init", f"random weights, seed {seed}", tokenizer=tokenizer)
    return export_encoder(random_encoder(config, seed), source, target, precision=precision, progress=progress)


def export_encoder(
    encoder: Encoder,
    source: Source,
    target: Target,
    *,
    precision: Precision = "float32",
    progress: Progress = lambda _: None,
) -> Exported:
    """Traces an encoder, compares the graph with it, and writes the bundle.

    Args:
        encoder: The encoder, in float32.
        source: Where it comes from.
        target: Where the bundle goes.
        precision: What the bundle computes in.
        progress: Called with what is being done.

    Raises:
        TokenizerError: The tokenizer gives ids that the encoder does not have, or the encoder takes embeddings.
        ParityError: ONNX Runtime does not reproduce the encoder, or not well enough in this precision.
        BundleError: One of its kinds: the bundle cannot be written.
    """
    if source.tokenizer is not None:
        if encoder.config.input == "embeddings":
            raise TokenizerError("a tokenizer gives token ids, but this model's input is embeddings; leave it out")
        source.tokenizer.check_fits(encoder.config.vocab_size)
    with bundle.draft(target.model_repository, target.name, target.version, overwrite=target.overwrite) as folder:
        progress("tracing the graph")
        graphs = graph.write_graphs(encoder, folder, precision)
        progress("comparing ONNX Runtime with PyTorch")
        parity = verify.check_parity(encoder, graphs.files[0], precision)
        verify.check_inspection(encoder, graphs)
        progress("writing the bundle")
        source = dataclasses.replace(source, model_digest=source.model_digest or digest_encoder(encoder))
        return complete(folder, target, manifest.describe(encoder, graphs), source, parity, graphs.files)


def complete(
    folder: Path,
    target: Target,
    model: manifest.Model,
    source: Source,
    parity: verify.Parity,
    files: Iterable[Path],
) -> Exported:
    """Adds the tokenizer and the manifest to a bundle's draft.

    Args:
        folder: The draft.
        target: Where the bundle will be.
        model: What is in the ONNX file.
        source: Where it comes from.
        parity: What was measured in ONNX Runtime.
        files: The files of the model, which lie in the folder already.

    Raises:
        ParityError: Texts' vectors are not those of sentence-transformers.
        ConfigError: The model is to be cut shorter than what its queries are made longer to.
    """
    listed = list(files)
    if source.tokenizer is not None:
        listed.append(source.tokenizer.write(folder / manifest.TOKENIZER_FILE))
    heads, written = _write_heads(source.vector, model.shape, folder)
    listed += written
    described = manifest.build_manifest(target.name, target.version, model, source, parity, listed, heads)
    compared = None if source.pipeline is None else source.pipeline(folder, described)
    if compared is not None:
        manifest.add_pipeline(described.parity, compared)
    (folder / manifest.FILE).write_text(manifest.to_json(described), encoding="utf-8")
    return Exported(target.model_repository / target.name / target.version, described)


def _write_heads(
    vector: SentenceVector, shape: manifest_pb2.EncoderShape, folder: Path
) -> tuple[manifest.Heads, list[Path]]:
    """Writes what comes after the encoder; which files those are."""
    there = set(folder.iterdir())
    head = multi_vector = sparse = None
    if vector.head is not None:
        head = write_head(vector.head, manifest.pooled_width(shape, vector), folder)
    if vector.multi_vector is not None:
        multi_vector = write_multi_vector(vector.multi_vector, shape.d_model, folder)
    if vector.sparse is not None:
        sparse = write_sparse(vector.sparse, shape, folder)
    for static in vector.static_weights:
        static.write(folder)
    return manifest.Heads(head, multi_vector, sparse), sorted(set(folder.iterdir()) - there)
