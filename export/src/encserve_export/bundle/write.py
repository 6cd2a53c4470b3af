"""Completes a bundle after its graph was written: adds files, and compares vectors with the original model's.

The added files are the tokenizer, the heads and the manifest. A head is a graph that runs after the encoder.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from encserve_export.bundle import manifest
from encserve_export.bundle.heads import write_head, write_multi_vector, write_scores, write_sparse
from encserve_export.bundle.manifest import Source
from encserve_export.bundle.space import check_form
from encserve_export.check import agreement
from encserve_export.check.expected import check_expected
from encserve_export.kinds.spec import ModelSpec
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

Progress = Callable[[str], None]


def show_progress(step: str) -> None:
    """Print the current step on stderr. Pass another function as `progress` to show steps elsewhere."""
    sys.stderr.write(f"encserve-export: {step}\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The destination of a bundle.

    Attributes:
        model_repository: The folder that contains all models.
        name: The model's name.
        version: The model's version.
        overwrite: Whether an existing version is replaced.
        keep_space_id: The space_id (the id of the model's vector space) to write into the manifest. If `keep_space_id`
            is empty, the exporter computes the space_id.

    Raises:
        ConfigError: `keep_space_id` does not look like a space_id.
    """

    model_repository: Path
    name: str
    version: str = "1"
    overwrite: bool = False
    keep_space_id: str = ""

    def __post_init__(self) -> None:
        """Check `keep_space_id`."""
        if self.keep_space_id:
            check_form(self.keep_space_id)


@dataclasses.dataclass(frozen=True, repr=False)
class Exported:
    """A written bundle.

    Attributes:
        path: The folder of the bundle.
        manifest: The content of the bundle's manifest.json.
        notes: Decisions that the user should know about, by topic. The topics are "route", "inspection", "text",
            "longest", "remark", "expected" (the file with the user's hidden states) and "compared with" (the library).
        unused_parts: Parts of the checkpoint that the bundle does not use, such as "classifier"; empty for ONNX files.
        replaced_space_id: The computed space_id, if `Target.keep_space_id` replaced it; otherwise empty.
    """

    path: Path
    manifest: manifest_pb2.Manifest
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused_parts: tuple[str, ...] = ()
    replaced_space_id: str = ""

    def with_notes(self, notes: Mapping[str, str]) -> Self:
        """Return a copy with more notes. Notes with an empty text are left out."""
        return dataclasses.replace(self, notes={**self.notes, **{topic: text for topic, text in notes.items() if text}})

    def __repr__(self) -> str:
        """Return the name, the version, the space_id and the folder in one line."""
        described = self.manifest
        return f"Exported({described.name!r}, version {described.version!r}, {described.space_id}, {str(self.path)!r})"


def complete(
    folder: Path,
    target: Target,
    model: manifest.Model,
    source: Source,
    parity: agreement.Parity,
    files: Iterable[Path],
) -> Exported:
    """Add the tokenizer, the heads and the manifest to a draft folder, and compare the vectors of texts.

    Args:
        folder: The draft folder of the bundle.
        target: The destination of the bundle.
        model: The description of the encoder.
        source: The origin of the model.
        parity: The result of the comparison of hidden states, see `check.agreement`.
        files: The paths of the files that are already in the folder: the graphs and their weights.

    Raises:
        ExpectedFileError: The user's file of hidden states does not fit this model.
        ExpectedRowsError: The bundle's hidden states differ from the hidden states in the user's file.
        ParityError: A head's output differs from PyTorch's. Or sentence-transformers or transformers gives other token
            ids or vectors for a text.
        ConfigError: The longest sequence is shorter than the length to which queries are expanded.
    """
    expected = source.expected
    agreed = None if expected is None else check_expected(expected, folder, model.graph, model.shape, parity.bounds)
    listed = list(files)
    if source.tokenizer is not None:
        listed.append(source.tokenizer.write(folder / manifest.TOKENIZER_FILE))
    before = set(folder.iterdir())
    heads = _write_heads(source.vector, model.shape, folder)
    listed += sorted(set(folder.iterdir()) - before)
    described = manifest.build_manifest(target.name, target.version, model, source, parity, listed, heads)
    computed = described.space_id
    if target.keep_space_id:
        described.space_id = target.keep_space_id
        described.fingerprint = fingerprint(described)
    compared = None if source.pipeline is None else source.pipeline(folder, described)
    if compared is not None:
        manifest.add_pipeline(described.parity, compared)
    if agreed is not None:
        manifest.add_expected(described.parity, agreed)
    (folder / manifest.FILE).write_text(manifest.to_json(described), encoding="utf-8")
    return Exported(
        target.model_repository / target.name / target.version,
        described,
        replaced_space_id=computed if described.space_id != computed else "",
    ).with_notes(
        {
            "expected": "" if expected is None else expected.path.name,
            "compared with": "" if compared is None else compared.library,
            "remark": "" if source.tokenizer is None else source.tokenizer.remark(model.shape.vocab_size),
        }
    )


def _write_heads(vector: ModelSpec, shape: manifest_pb2.EncoderShape, folder: Path) -> dict[str, Any]:
    """Write the heads and the static weights. Return the manifest fields of the heads, by their names."""
    heads = dict[str, Any]()
    if vector.head is not None:
        heads["head"] = write_head(vector.head, manifest.pooled_width(shape, vector), folder)
    if vector.multi_vector is not None:
        heads["multi_vector"] = write_multi_vector(vector.multi_vector, shape.d_model, folder)
    if vector.sparse is not None:
        heads["sparse"] = write_sparse(vector.sparse, shape, folder)
    if vector.scores is not None:
        heads["scores"] = write_scores(vector.scores, shape.d_model, folder)
    for static in vector.static_weights:
        static.write(folder)
    return heads
