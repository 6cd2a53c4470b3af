"""Builds the manifest of a bundle, as defined in `proto/encserve/bundle/v1/manifest.proto`."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from encserve import __version__
from encserve_export.bundle.space import space_id
from encserve_export.check.agreement import Parity
from encserve_export.check.expected import Agreement, Expected
from encserve_export.check.pipeline import Compared
from encserve_export.check.scores import ComparedScores
from encserve_export.core.errors import ConfigError
from encserve_export.kinds.spec import ModelSpec
from encserve_export.source.tokenizer import TokenizerFile
from encserve_export.source.weights import sha256
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint, to_fields

FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT_VERSION = 1
_TOOLS = ("onnx", "onnxruntime", "tokenizers", "torch")


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin, the tokenizer and the pooling of a model, and the comparisons that the bundle must pass.

    Attributes:
        kind: The kind of the export: "hf", "checkpoint", "module", "onnx" or "init", as in the names of the commands.
        description: The model's class or type, shown to people, such as "BertModel".
        weights_sha256: SHA-256 of the weights file, in hex; empty for random weights.
        vector: How the model turns texts into vectors.
        tokenizer: The tokenizer, or None if the model takes token ids only.
        route: How `hf` exported the model: "transformers", "onnx" or "static". Empty for the other commands.
        repository: OWNER/NAME on the Hugging Face hub; empty for local files.
        revision: The commit on the hub, in hex; empty for local files.
        pipeline: The function that compares a bundle with sentence-transformers or transformers, see `check.pipeline`;
            None for no comparison.
        model_digest: The SHA-256 of weights and configuration, see `bundle.space`.
        expected: The hidden states that the user's own module computed. The bundle must reproduce them. None if the
            user gave no hidden states.
    """

    kind: str
    description: str
    weights_sha256: str = ""
    vector: ModelSpec = dataclasses.field(default_factory=ModelSpec)
    tokenizer: TokenizerFile | None = None
    route: str = ""
    repository: str = ""
    revision: str = ""
    pipeline: Callable[[Path, manifest_pb2.Manifest], Compared | ComparedScores | None] | None = None
    model_digest: str = ""
    expected: Expected | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """The description of a bundle's encoder.

    Attributes:
        shape: The encoder's sizes and settings.
        graph: The inputs and the output of the ONNX file.
        parameters: The number of parameters of each part of the model.
        inspect_graph: The description of the ONNX file that also returns attention weights and all hidden states, or
            None.
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
    parity: Parity,
    files: Iterable[Path],
    heads: Mapping[str, Any],
) -> manifest_pb2.Manifest:
    """Build the manifest, with its space_id and fingerprint.

    The space_id identifies the vector space of the model. The fingerprint identifies the bundle.

    Args:
        name: The model's name.
        version: The model's version.
        model: The description of the encoder.
        source: The origin of the model.
        parity: The results of comparing hidden states, see `check.agreement`.
        files: The paths of the bundle's files. No file is in a subfolder.
        heads: The graphs that run after the encoder, by manifest field: "head", "multi_vector", "sparse" or
            "scores".

    Raises:
        ConfigError: The model expands each query or document to a length that exceeds max_sequence_tokens.
    """
    vector, paths, shape = source.vector, sorted(files), model.shape
    width = heads["head"].width if "head" in heads else pooled_width(shape, vector)
    manifest = manifest_pb2.Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        version=version,
        encoder=shape,
        text=_text(shape, source.tokenizer, vector),
        pooling=vector.pooling,
        l2_normalize=vector.l2_normalize,
        more_poolings=vector.more_poolings,
        pooling_skips_prompt=vector.skips_prompt,
        prompts=vector.prompts,
        default_prompt_name=vector.default_prompt_name,
        dimensions=vector.dimensions if vector.pooling and vector.dimensions < width else 0,
        similarity=vector.similarity,
        query=_task(vector, "query", shape.max_sequence_tokens),
        document=_task(vector, "document", shape.max_sequence_tokens),
        graph=model.graph,
        source=manifest_pb2.Source(
            kind=source.kind,
            description=source.description,
            weights_sha256=source.weights_sha256,
            versions={"encserve": __version__} | {tool: metadata.version(tool) for tool in _tools(source)},
            route=source.route,
            repository=source.repository,
            revision=source.revision,
        ),
        files=[
            manifest_pb2.BundleFile(path=path.name, size_bytes=path.stat().st_size, sha256=sha256([path]))
            for path in paths
        ],
        parameters=[manifest_pb2.ParameterCount(part=part, count=count) for part, count in model.parameters.items()],
        parity=_parity(parity),
        inspect_graph=model.inspect_graph,
        **heads,
    )
    manifest.space_id = space_id(manifest, source.model_digest, vector.modules, paths[0].parent)
    manifest.fingerprint = fingerprint(manifest)
    return manifest


def _task(vector: ModelSpec, name: str, longest: int) -> manifest_pb2.TaskSettings | None:
    settings = vector.tasks.get(name)
    if settings is None:
        return None
    if settings.expansion.min_tokens > longest:
        raise ConfigError(
            f"max_sequence_tokens must be at least {settings.expansion.min_tokens}, the length to which each {name} is "
            f"expanded; was {longest}"
        )
    task = manifest_pb2.TaskSettings()
    task.CopyFrom(settings)
    task.max_tokens = settings.max_tokens if settings.max_tokens < longest else 0
    return task


def pooled_width(shape: manifest_pb2.EncoderShape, vector: ModelSpec) -> int:
    """Return the number of dimensions of a pooled vector."""
    return shape.d_model * (1 + len(vector.more_poolings))


def to_json(manifest: manifest_pb2.Manifest) -> str:
    """Return the manifest in protobuf's JSON form, with every field, always in the same order."""
    fields = to_fields(manifest)
    for parent, name in ((fields["source"], "versions"), (fields, "prompts")):
        parent[name] = dict(sorted(parent[name].items()))
    return json.dumps(fields, indent=2) + "\n"


def _tools(source: Source) -> list[str]:
    if "onnx" in (source.kind, source.route):  # PyTorch did not write the graph
        return [tool for tool in _TOOLS if tool != "torch"]
    return [*_TOOLS, *(["transformers"] if source.route == "transformers" else [])]


def _text(
    shape: manifest_pb2.EncoderShape, tokenizer: TokenizerFile | None, vector: ModelSpec
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


def _parity(parity: Parity) -> manifest_pb2.Parity:
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


def add_pipeline(parity: manifest_pb2.Parity, compared: Compared | ComparedScores) -> None:
    """Add the results of the comparison with sentence-transformers or transformers."""
    if isinstance(compared, ComparedScores):
        parity.score_pairs = compared.pairs
        parity.max_score_error = _rounded(compared.max_error)
        if compared.bounds.rank_correlation is None:
            parity.score_tolerance = _rounded(compared.tolerance)
        else:
            parity.min_score_rank_correlation = _rounded_cosine(compared.min_rank_correlation)
            parity.max_score_change = _rounded(compared.max_change)
        return
    parity.pipeline_texts = compared.texts
    parity.max_pipeline_error = _rounded(compared.max_relative_error)
    if compared.bounds.cosine is not None:
        parity.min_pipeline_cosine = _rounded_cosine(compared.min_cosine)
    if compared.max_maxsim_error is not None:
        parity.max_maxsim_error = _rounded(compared.max_maxsim_error)
        parity.maxsim_tolerance = compared.bounds.maxsim_error


def add_expected(parity: manifest_pb2.Parity, agreement: Agreement) -> None:
    """Add the results of the comparison with the user's hidden states."""
    parity.expected_rows = agreement.rows
    parity.max_expected_error = _rounded(agreement.max_relative_error)
    if agreement.bounds.cosine is not None:
        parity.min_expected_cosine = _rounded_cosine(agreement.min_cosine)


def _rounded(error: float) -> float:
    """Round to two significant digits. Further digits differ between exports, because the order of sums varies."""
    return float(f"{error:.1e}")


def _rounded_cosine(cosine: float) -> float:
    """Round a cosine similarity so that its difference from 1 has two significant digits."""
    return round(1 - _rounded(1 - cosine), 12)
