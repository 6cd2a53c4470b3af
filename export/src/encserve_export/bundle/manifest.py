"""Fills the manifest of a bundle. The contract is `proto/encserve/bundle/v1/manifest.proto`."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from encserve_export.bundle.space import space_id
from encserve_export.check import agreement
from encserve_export.check.expected import Agreement, Expected
from encserve_export.check.texts import Compared
from encserve_export.ground.errors import ConfigError
from encserve_export.kinds.recipe import Recipe
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint, to_fields

FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT_VERSION = 1
_TOOLS = ("encserve-export", "onnx", "onnxruntime", "tokenizers", "torch")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an encoder comes from, and all that a bundle holds besides its weights.

    Attributes:
        kind: The export command, "hf", "checkpoint", "onnx" or "init"; "module" of `export_module`.
        description: For people, e.g. "BertModel".
        weights_sha256: SHA-256 of the weights file, in hex; empty for random weights.
        vector: How the model was trained to make one vector of a sequence.
        tokenizer: The tokenizer, or None where the model takes token ids only.
        route: How `hf` made the graph, "own", "onnx", "transformers" or "static"; empty for the other
            commands.
        repository: Where on the Hugging Face hub it came from, OWNER/NAME; empty where it did not.
        revision: The commit there, in hex.
        pipeline: Compares a bundle's files with sentence-transformers' own reading, see `check.texts`; None
            where there is none.
        model_digest: What identifies its weights and configuration, see `space`; empty for those of the encoder.
        expected: Rows that the caller's own module made, which the bundle must give; None where there are none.
    """

    kind: str
    description: str
    weights_sha256: str = ""
    vector: Recipe = dataclasses.field(default_factory=Recipe)
    tokenizer: TokenizerFile | None = None
    route: str = ""
    repository: str = ""
    revision: str = ""
    pipeline: Callable[[Path, manifest_pb2.Manifest], Compared | None] | None = None
    model_digest: str = ""
    expected: Expected | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """What a bundle says of its model, whether we traced it or it came as ONNX.

    Attributes:
        shape: Its sizes and choices.
        graph: The ONNX file's interface.
        parameters: How many numbers it has, by part.
        inspect_graph: The ONNX file that gives what happens inside; None where there is none.
    """

    shape: manifest_pb2.EncoderShape
    graph: manifest_pb2.Graph
    parameters: Mapping[str, int]
    inspect_graph: manifest_pb2.InspectGraph | None = None


def build_manifest(
    name: str,
    version: str,
    model: Model,
    source: Source,
    parity: agreement.Parity,
    files: Iterable[Path],
    heads: Mapping[str, Any],
) -> manifest_pb2.Manifest:
    """Describes a bundle.

    Args:
        name: The model's name.
        version: The model's version.
        model: What is in the ONNX file.
        source: Where it comes from.
        parity: What was measured in ONNX Runtime.
        files: All files of the bundle, which must lie directly in its folder.
        heads: The interfaces of what comes after the encoder, by the manifest's names for them: "head", "multi_vector"
            and "sparse".

    Raises:
        ConfigError: The longest sequence is shorter than what queries are made longer to.
    """
    vector, listed = source.vector, sorted(files)
    width = pooled_width(model.shape, vector) if "head" not in heads else heads["head"].width
    manifest = manifest_pb2.Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        encoder=model.shape,
        text=_text(model.shape, source.tokenizer, vector),
        pooling=vector.pooling,
        l2_normalize=vector.l2_normalize,
        more_poolings=vector.more_poolings,
        pooling_skips_prompt=vector.skips_prompt,
        prompts=vector.prompts,
        default_prompt_name=vector.default_prompt_name,
        dimensions=vector.dimensions if vector.pooling and vector.dimensions < width else 0,
        similarity=vector.similarity,
        query=_task(vector, "query", model.shape.max_sequence_tokens),
        document=_task(vector, "document", model.shape.max_sequence_tokens),
        graph=model.graph,
        source=manifest_pb2.Source(
            kind=source.kind,
            description=source.description,
            weights_sha256=source.weights_sha256,
            versions={tool: metadata.version(tool) for tool in _tools(source)},
            route=source.route,
            repository=source.repository,
            revision=source.revision,
        ),
        files=[_bundle_file(path) for path in listed],
        parameters=[manifest_pb2.ParameterCount(part=part, count=count) for part, count in model.parameters.items()],
        parity=_parity(parity),
        inspect_graph=model.inspect_graph,
        **heads,
    )
    manifest.space_id = space_id(manifest, source.model_digest, vector.modules, listed[0].parent)
    manifest.fingerprint = fingerprint(manifest)
    return manifest


def _task(vector: Recipe, name: str, longest: int) -> manifest_pb2.TaskSettings | None:
    """The settings of a task, as far as the longest sequence allows them."""
    settings = vector.tasks.get(name)
    if settings is None:
        return None
    if settings.expansion.min_tokens > longest:
        raise ConfigError(
            f"max_sequence_tokens must be at least {settings.expansion.min_tokens}, to which a {name} is made longer; "
            f"was {longest}"
        )
    its = manifest_pb2.TaskSettings()
    its.CopyFrom(settings)
    its.max_tokens = settings.max_tokens if settings.max_tokens < longest else 0
    return its


def pooled_width(shape: manifest_pb2.EncoderShape, vector: Recipe) -> int:
    """The numbers of a vector that comes from pooling."""
    return shape.d_model * (1 + len(vector.more_poolings))


def to_json(manifest: manifest_pb2.Manifest) -> str:
    """The manifest in protobuf's JSON form, every field written out, always in the same order."""
    fields = to_fields(manifest)
    for of, name in ((fields["source"], "versions"), (fields, "prompts")):
        of[name] = dict(sorted(of[name].items()))
    return json.dumps(fields, indent=2) + "\n"


def _tools(source: Source) -> list[str]:
    """The tools that wrote the bundle: PyTorch has no part in one of a model that came as ONNX."""
    if "onnx" in (source.kind, source.route):
        return [tool for tool in _TOOLS if tool != "torch"]
    return [*_TOOLS, *(["transformers"] if source.route == "transformers" else [])]


def _text(
    shape: manifest_pb2.EncoderShape, tokenizer: TokenizerFile | None, vector: Recipe
) -> manifest_pb2.TextInput | None:
    if tokenizer is None:
        return None
    return manifest_pb2.TextInput(
        tokenizer_file=TOKENIZER_FILE,
        special_token_ids=sorted({*tokenizer.around_text, shape.pad_token_id}),
        split_special_tokens=tokenizer.split_special_tokens,
        max_tokens=vector.max_tokens if vector.max_tokens < shape.max_sequence_tokens else 0,
        template=vector.template,
        takes_empty=vector.kind == "static",
    )


def _bundle_file(path: Path) -> manifest_pb2.BundleFile:
    return manifest_pb2.BundleFile(path=path.name, size_bytes=path.stat().st_size, sha256=sha256([path]))


def _parity(parity: agreement.Parity) -> manifest_pb2.Parity:
    bounds = parity.bounds
    more: dict[str, Any] = {"padding_tolerance": _rounded(bounds.padding_error or 0)}
    if bounds.cosine is not None:
        more = {
            "min_cosine": _rounded_cosine(parity.min_cosine),
            "min_padding_cosine": _rounded_cosine(parity.min_padding_cosine),
            "required_min_cosine": bounds.cosine,
            "required_min_padding_cosine": bounds.padding_cosine,
        }
    return manifest_pb2.Parity(
        tolerance=_rounded(bounds.error or 0),
        float32_error=_rounded(parity.float32_error or 0),
        max_relative_error=_rounded(parity.max_relative_error),
        max_padding_error=_rounded(parity.max_padding_error),
        cases=[
            manifest_pb2.ParityCase(lengths=case.lengths, max_relative_error=_rounded(case.max_relative_error))
            for case in parity.cases
        ],
        **more,
    )


def add_pipeline(parity: manifest_pb2.Parity, compared: Compared) -> None:
    """Adds what was found of texts' vectors."""
    parity.pipeline_texts = compared.texts
    parity.max_pipeline_error = _rounded(compared.max_relative_error)
    if compared.bounds.cosine is not None:
        parity.min_pipeline_cosine = _rounded_cosine(compared.min_cosine)
    if compared.max_maxsim_error is not None:
        parity.max_maxsim_error = _rounded(compared.max_maxsim_error)
        parity.maxsim_tolerance = compared.bounds.maxsim_error


def add_expected(parity: manifest_pb2.Parity, found: Agreement) -> None:
    """Adds what was found of the caller's own rows."""
    parity.expected_rows = found.rows
    parity.max_expected_error = _rounded(found.max_relative_error)
    if found.bounds.cosine is not None:
        parity.min_expected_cosine = _rounded_cosine(found.min_cosine)


def _rounded(error: float) -> float:
    """Two digits: more would only say which thread added what first."""
    return float(f"{error:.1e}")


def _rounded_cosine(cosine: float) -> float:
    """Two digits of what it lacks of 1, for the same reason."""
    return round(1 - _rounded(1 - cosine), 12)
