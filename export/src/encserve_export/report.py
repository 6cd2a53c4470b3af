"""Prints the result of an export."""

from rich.console import Console
from rich.table import Table

from encserve_export.bundle.write import Exported
from encserve_export.core import names
from encserve_export.core.errors import printable
from encserve_export.core.precision import BOUNDS
from encserve_export.kinds.spec import TASKS
from encserve_proto.bundle.v1 import manifest_pb2

_POOLING_UNKNOWN = (
    "not given by the checkpoint, so each call must name a pooling. sentence-transformers would use mean, or "
    "last_token for a ...ForCausalLM. --pooling sets the pooling"
)
_NOT_COMPARED_ROWS = (
    "no rows given: the configuration (norm, activation, positions, ...) was not compared with your module. --expect "
    "compares the bundle with rows of your module"
)
# The report warns the user if PyTorch's own float32 error exceeds this number: rounding then changes vectors visibly.
_LARGE_FLOAT32_ERROR = 1e-4
_SPARSE_POOLINGS = {
    manifest_pb2.SPARSE_POOLING_MAX: "the maximum over the tokens",
    manifest_pb2.SPARSE_POOLING_SUM: "the sum over the tokens",
    manifest_pb2.SPARSE_POOLING_OWN_ID: "each token gives a weight to its own id",
}


def show(exported: Exported, console: Console) -> None:
    """Print a table with the parameters of each part. Then print one fact per line, such as the bundle's folder."""
    console.print(_parameters(exported.manifest))
    console.print()
    for name, value in _facts(exported):
        # Users copy names and paths, so lines are not wrapped at the terminal's width.
        console.print(f"{name:<13}{printable(value)}", soft_wrap=True, highlight=False, markup=False)


def _parameters(manifest: manifest_pb2.Manifest) -> Table:
    total = sum(part.count for part in manifest.parameters)
    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("part", footer="total")
    table.add_column("parameters", footer=f"{total:,}", justify="right")
    table.add_column("share", footer="100.0 %", justify="right")
    for part in manifest.parameters:
        table.add_row(part.part, f"{part.count:,}", f"{100 * part.count / max(total, 1):.1f} %")
    return table


def _facts(exported: Exported) -> list[tuple[str, str]]:
    """Return the name and the value of each line of the report, in order. Lines with an empty value are left out."""
    manifest, notes = exported.manifest, exported.notes
    size = sum(file.size_bytes for file in manifest.files if file.path.startswith(names.FILE))
    facts = [
        ("route", notes.get("route", "")),
        ("inspection", notes.get("inspection", "")),
        ("text", notes.get("text", "")),
        ("pooling", _pooling(exported)),
        ("vectors", _multi_vector(manifest.multi_vector) if manifest.HasField("multi_vector") else ""),
        ("weights", _sparse(manifest.sparse) if manifest.HasField("sparse") else ""),
        ("scores", _scores(manifest) if manifest.HasField("scores") else ""),
        *((task, _task(getattr(manifest, task), manifest)) for task in TASKS if manifest.HasField(task)),
        ("unused parts", ", ".join(exported.unused_parts)),
        ("model size", f"{size / 2**20:,.1f} MiB, {manifest.graph.precision}, opset {manifest.graph.opset}"),
        ("parity", _parity(manifest.parity)),
        ("expected", _expected(exported)),
        ("padding", _padding(manifest.parity)),
        ("pipeline", _pipeline(manifest.parity, notes.get("compared with", ""))),
        ("cases", f"{len(manifest.parity.cases)} batches, lengths 1 to {manifest.encoder.max_sequence_tokens}"),
        ("longest", notes.get("longest", "")),
        ("remark", notes.get("remark", "")),
        ("fingerprint", manifest.fingerprint),
        ("space", _space(exported)),
        ("bundle", str(exported.path)),
    ]
    return [(name, value) for name, value in facts if value]


def _space(exported: Exported) -> str:
    written, computed = exported.manifest.space_id, exported.replaced_space_id
    return f"{written}, from --keep-space-id and not verified; computed: {computed}" if computed else written


def _pooling(exported: Exported) -> str:
    manifest = exported.manifest
    if not manifest.pooling:
        pools = any(map(manifest.HasField, ("multi_vector", "sparse", "scores")))
        return "" if pools or "route" not in exported.notes else _POOLING_UNKNOWN
    poolings = [manifest_pb2.Pooling.Name(it) for it in (manifest.pooling, *manifest.more_poolings)]
    listed = " and ".join(it.removeprefix("POOLING_").lower().replace("_", " ") for it in poolings)
    width = manifest.dimensions or manifest.head.width or manifest.encoder.d_model * len(poolings)
    return f"{listed}{', scaled to length 1' if manifest.l2_normalize else ''}, {width} dimensions"


def _multi_vector(multi_vector: manifest_pb2.MultiVector) -> str:
    return f"one vector of {multi_vector.width} dimensions per token, compared by {multi_vector.similarity}"


def _sparse(sparse: manifest_pb2.Sparse) -> str:
    largest = f", only the {sparse.max_active_dims} largest" if sparse.max_active_dims else ""
    return f"over {sparse.width} words, {_SPARSE_POOLINGS[sparse.pooling]}{largest}"


def _scores(manifest: manifest_pb2.Manifest) -> str:
    scores = manifest.scores
    shown = ", ".join(scores.labels[:5]) + (", ..." if len(scores.labels) > 5 else "")
    named = f"{len(scores.labels)} labels ({shown})" if len(scores.labels) > 1 else "1 label"
    activation = manifest_pb2.Activation.Name(scores.activation).removeprefix("ACTIVATION_").lower()
    takes = "pairs of texts only" if manifest.text.template.HasField("between") else "pairs of texts, and texts"
    return f"{named}, activation {activation}, for {takes}"


def _task(task: manifest_pb2.TaskSettings, manifest: manifest_pb2.Manifest) -> str:
    facts = [f"prompt {manifest.prompts[task.prompt_name]!r}"] if task.prompt_name else []
    facts.append(f"at most {task.max_tokens or manifest.encoder.max_sequence_tokens} tokens")
    if task.HasField("expansion"):
        attended = "attended" if task.expansion.attended else "not attended"
        facts.append(f"expanded to {task.expansion.min_tokens} with token {task.expansion.token_id}, {attended}")
    if task.HasField("static_sparse"):
        longest = f", at most {task.static_sparse.max_tokens} tokens" if task.static_sparse.max_tokens else ""
        facts.append(f"weights from a table, without running the encoder{longest}")
    if task.skipped_token_ids:
        facts.append(f"no vector for {len(task.skipped_token_ids)} token ids")
    if task.kept_token_ids:
        facts.append(f"vectors for {len(task.kept_token_ids)} token ids only")
    if task.token_pooling.factor > 1:
        facts.append(f"{task.token_pooling.factor:g} vectors joined into one")
    return ", ".join(facts)


def _parity(parity: manifest_pb2.Parity) -> str:
    if parity.required_min_cosine:
        return f"least cosine similarity {parity.min_cosine:.6g}, required {parity.required_min_cosine}"
    if not parity.tolerance:
        return "not compared with PyTorch: the model came as ONNX"
    errors = f"max error {parity.max_relative_error:.1e}, tolerance {parity.tolerance:.1e}, compared with PyTorch in"
    if not parity.float32_error:
        return f"{errors} float32: the model does not run in float64"
    text = f"{errors} float64; PyTorch's own float32 error {parity.float32_error:.1e}"
    if parity.float32_error > _LARGE_FLOAT32_ERROR:
        text += (
            f". float32 is off by more than {_LARGE_FLOAT32_ERROR:.0e} for this model: vectors that other CPUs or "
            "libraries compute differ by a similar amount"
        )
    return text


def _expected(exported: Exported) -> str:
    parity, file = exported.manifest.parity, exported.notes.get("expected", "")
    if not file:
        return _NOT_COMPARED_ROWS if exported.manifest.source.kind == "checkpoint" else ""
    if parity.min_expected_cosine:
        return (
            f"{parity.expected_rows} rows compared with {file}, "
            f"least cosine similarity {parity.min_expected_cosine:.6g}"
        )
    tolerance = parity.tolerance or BOUNDS["float32"].error
    return (
        f"{parity.expected_rows} rows compared with {file}, max error {parity.max_expected_error:.1e}, "
        f"tolerance {tolerance:.1e}"
    )


def _pipeline(parity: manifest_pb2.Parity, library: str) -> str:
    if not library:
        return ""
    if parity.score_pairs:
        compared = f"{parity.score_pairs} pairs and texts compared with {library}, max error of a logit "
        compared += f"{parity.max_score_error:.1e}"
        if parity.score_tolerance:
            return f"{compared}, tolerance {parity.score_tolerance:.1e}"
        return (
            f"{compared}, rank correlation {parity.min_score_rank_correlation:.6g}, largest change of a score "
            f"{parity.max_score_change:.1e}"
        )
    compared = f"{parity.pipeline_texts} texts compared with {library}, max error {parity.max_pipeline_error:.1e}"
    if parity.min_pipeline_cosine:
        compared += f", least cosine similarity {parity.min_pipeline_cosine:.6g}"
    if parity.maxsim_tolerance:
        compared += (
            f", largest error of a MaxSim score {parity.max_maxsim_error:.1e} of the query's best score, tolerance "
            f"{parity.maxsim_tolerance:g}"
        )
    return compared


def _padding(parity: manifest_pb2.Parity) -> str:
    if parity.required_min_padding_cosine:
        return f"least cosine similarity {parity.min_padding_cosine:.6g}, required {parity.required_min_padding_cosine}"
    return f"max error {parity.max_padding_error:.1e}, tolerance {parity.padding_tolerance:.1e}"
