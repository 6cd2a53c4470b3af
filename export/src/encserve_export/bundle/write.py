"""Completes a bundle whose graph is written: tokenizer, heads, manifest, and the comparison of texts."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from encserve_export.bundle import manifest
from encserve_export.bundle.heads import write_head, write_multi_vector, write_sparse
from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import check_form
from encserve_export.check import agreement
from encserve_export.check.expected import check_expected
from encserve_export.kinds.spec import ModelSpec
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where a bundle goes.

    Attributes:
        model_repository: The folder of all models.
        name: The model's name.
        version: The model's version.
        overwrite: Whether a version that is there is replaced.
        keep_space_id: The id of the vector space that the bundle is to have, in place of the model's own; empty for the
            model's own.

    Raises:
        ConfigError: `keep_space_id` has not the form of one.
    """

    model_repository: Path
    name: str
    version: str = "1"
    overwrite: bool = False
    keep_space_id: str = ""

    def __post_init__(self) -> None:
        """Refuses what is no id."""
        if self.keep_space_id:
            check_form(self.keep_space_id)


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
        replaced_space_id: The model's own id of its vector space where `Target.keep_space_id` gave another; else empty.
        formula: Where what is computed differs from the code that such a checkpoint comes from, for people.
        expected: With what the caller's own rows were compared, for people; empty where none were given.
        compared_with: The library whose ids and vectors of texts were compared, "sentence-transformers" or
            "transformers"; empty where none was.
        remarks: What else may surprise, for people.
    """

    path: Path
    manifest: manifest_pb2.Manifest
    remark: str = ""
    route: str = ""
    text: str = ""
    left_behind: tuple[str, ...] = ()
    replaced_space_id: str = ""
    formula: str = ""
    expected: str = ""
    compared_with: str = ""
    remarks: tuple[str, ...] = ()


def complete(
    folder: Path,
    target: Target,
    model: manifest.Model,
    source: Source,
    parity: agreement.Parity,
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
        ExpectedFileError: The caller's own rows are of another kind of model.
        ExpectedRowsError: The bundle does not give the caller's own rows.
        ParityError: Texts' vectors are not those of sentence-transformers.
        ConfigError: The model is to be cut shorter than what its queries are made longer to.
    """
    expected = source.expected
    agreed = None if expected is None else check_expected(expected, folder, model.graph, model.shape, parity.bounds)
    listed = list(files)
    if source.tokenizer is not None:
        listed.append(source.tokenizer.write(folder / manifest.TOKENIZER_FILE))
    heads, written = _write_heads(source.vector, model.shape, folder)
    listed += written
    described = manifest.build_manifest(target.name, target.version, model, source, parity, listed, heads)
    own = described.space_id
    if target.keep_space_id:
        described.space_id = target.keep_space_id
        described.fingerprint = fingerprint(described)
    compared = None if source.pipeline is None else source.pipeline(folder, described)
    if compared is not None:
        manifest.add_pipeline(described.parity, compared)
    if agreed is not None:
        manifest.add_expected(described.parity, agreed)
    (folder / manifest.FILE).write_text(manifest.to_json(described), encoding="utf-8")
    path = target.model_repository / target.name / target.version
    return Exported(
        path,
        described,
        replaced_space_id=own if described.space_id != own else "",
        expected="" if expected is None else expected.path.name,
        compared_with="" if compared is None else compared.library,
        remarks=() if source.tokenizer is None else source.tokenizer.remarks(model.shape.vocab_size),
    )


def _write_heads(
    vector: ModelSpec, shape: manifest_pb2.EncoderShape, folder: Path
) -> tuple[dict[str, Any], list[Path]]:
    """Writes what comes after the encoder; its interfaces, and which files those are."""
    there, heads = set(folder.iterdir()), dict[str, Any]()
    if vector.head is not None:
        heads["head"] = write_head(vector.head, manifest.pooled_width(shape, vector), folder)
    if vector.multi_vector is not None:
        heads["multi_vector"] = write_multi_vector(vector.multi_vector, shape.d_model, folder)
    if vector.sparse is not None:
        heads["sparse"] = write_sparse(vector.sparse, shape, folder)
    for static in vector.static_weights:
        static.write(folder)
    return heads, sorted(set(folder.iterdir()) - there)
