"""Shows an export's result, and what is in a bundle, as tables."""

from rich.console import Console
from rich.table import Table

from encserve_export.bundle.parameters import LayerParameters, count_by_layer
from encserve_export.bundle.propagation import Propagation
from encserve_export.bundle.read import ReadBundle
from encserve_export.bundle.write import Exported
from encserve_export.ground import names
from encserve_export.ground.errors import printable
from encserve_export.ground.precision import BOUNDS
from encserve_export.kinds.spec import TASKS
from encserve_proto.bundle.v1 import manifest_pb2

_POOLING = (
    "not said by the checkpoint, so callers ask for one by its name; sentence-transformers would take the mean, or the "
    "last token of a ...ForCausalLM. --pooling sets it"
)
# From here on the report says that float32 is not enough for a model's rows to be the same everywhere.
_FAR_OFF = 1e-4


def show(exported: Exported, console: Console) -> None:
    """Prints parameters by part, file sizes, parity, and where the bundle is."""
    console.print(_parameters(exported.manifest))
    console.print()
    _print_facts(_facts(exported), console)


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
    manifest, parity = exported.manifest, exported.manifest.parity
    size = sum(file.size_bytes for file in manifest.files if file.path.startswith(names.FILE))
    return [
        *([("route", exported.route)] if exported.route else []),
        *([("text", exported.text)] if exported.text else []),
        *([("pooling", _POOLING)] if exported.route and not _gives_vectors(manifest) else []),
        *([("pooling", _pooling(manifest))] if manifest.pooling else []),
        *([("vectors", _vectors(manifest.multi_vector))] if manifest.HasField("multi_vector") else []),
        *([("weights", _weights(manifest.sparse))] if manifest.HasField("sparse") else []),
        *((task, _task(getattr(manifest, task), manifest)) for task in TASKS if manifest.HasField(task)),
        *([("left behind", ", ".join(exported.left_behind))] if exported.left_behind else []),
        ("model size", f"{size / 2**20:,.1f} MiB, {manifest.graph.precision}, opset {manifest.graph.opset}"),
        ("parity", _parity(manifest)),
        *([("expected", _expected(exported))] if exported.expected or manifest.source.kind == "checkpoint" else []),
        *([("formula", exported.formula)] if exported.formula else []),
        ("padding", _padding(parity)),
        *([("pipeline", _pipeline(exported))] if exported.compared_with else []),
        ("cases", f"{len(parity.cases)} batches, lengths 1 to {manifest.encoder.max_sequence_tokens}"),
        *([("longest", exported.remark)] if exported.remark else []),
        *(("remark", it) for it in exported.remarks),
        ("fingerprint", manifest.fingerprint),
        ("space", _space(exported)),
        ("bundle", str(exported.path)),
    ]


def _space(exported: Exported) -> str:
    own, given = exported.replaced_space_id, exported.manifest.space_id
    return f"{given}, as --keep-space-id asks and unchecked; the model's own is {own}" if own else given


def _pooling(manifest: manifest_pb2.Manifest) -> str:
    kinds = [manifest_pb2.Pooling.Name(it) for it in (manifest.pooling, *manifest.more_poolings)]
    said = " and ".join(it.removeprefix("POOLING_").lower().replace("_", " ") for it in kinds)
    width = manifest.dimensions or manifest.head.width or manifest.encoder.d_model * len(kinds)
    return f"{said}{', scaled to length 1' if manifest.l2_normalize else ''}, {width} numbers"


def _vectors(its: manifest_pb2.MultiVector) -> str:
    return f"one of {its.width} numbers for each token that counts, compared by {its.similarity}"


def _weights(its: manifest_pb2.Sparse) -> str:
    how = {
        manifest_pb2.SPARSE_POOLING_MAX: "the largest of all tokens",
        manifest_pb2.SPARSE_POOLING_SUM: "the sum over all tokens",
        manifest_pb2.SPARSE_POOLING_OWN_ID: "of each token under its own id",
    }[its.pooling]
    kept = f", no more than the {its.max_active_dims} largest" if its.max_active_dims else ""
    return f"over {its.width} words, {how}{kept}"


def _task(its: manifest_pb2.TaskSettings, manifest: manifest_pb2.Manifest) -> str:
    said = [f"at most {its.max_tokens or manifest.encoder.max_sequence_tokens} tokens"]
    if its.prompt_name:
        said.insert(0, f"prompt {manifest.prompts[its.prompt_name]!r}")
    if its.HasField("expansion"):
        seen = "seen" if its.expansion.attended else "not seen"
        said.append(f"made {its.expansion.min_tokens} with token {its.expansion.token_id}, {seen} by others")
    if its.HasField("static_sparse"):
        longest = f" of at most {its.static_sparse.max_tokens} tokens" if its.static_sparse.max_tokens else ""
        said.append(f"weights from a table{longest}, without a run of the model")
    for ids, what in ((its.skipped_token_ids, "have no vector"), (its.kept_token_ids, "alone have one")):
        if ids:
            said.append(f"{len(ids)} of the vocabulary's tokens {what}")
    if its.token_pooling.factor > 1:
        said.append(f"{its.token_pooling.factor:g} vectors joined into one")
    return ", ".join(said)


def _gives_vectors(manifest: manifest_pb2.Manifest) -> bool:
    return bool(manifest.pooling) or manifest.HasField("multi_vector") or manifest.HasField("sparse")


def show_bundle(bundle: ReadBundle, console: Console) -> None:
    """Prints what a bundle is, and its parameters by layer and part."""
    manifest, shape = bundle.manifest, bundle.manifest.encoder
    facts = [
        ("model", f"{manifest.name}, version {manifest.version}, fingerprint {manifest.fingerprint}"),
        *([("space", manifest.space_id)] if manifest.space_id else []),
        ("source", f"{manifest.source.kind}: {manifest.source.description}"),
        ("encoder", _describe(shape)),
    ]
    _print_facts(facts, console)
    console.print()
    if manifest.HasField("inspect_graph"):
        layers = count_by_layer(bundle)
        console.print(_parameters_by_layer(manifest, layers))
        unused = sum(part.count for part in manifest.parameters) - sum(layer.total for layer in layers)
        if unused:
            console.print(f"and {unused:,} that the graph never uses, such as rows for other token types")
    else:
        console.print(_parameters(manifest))


def show_propagation(propagation: Propagation, sequence: str, console: Console) -> None:
    """Prints the signal after each layer.

    Args:
        propagation: The figures.
        sequence: What was run, for people.
        console: Where to print.
    """
    without = propagation.without_residuals
    table = Table(box=None, pad_edge=False)
    table.add_column("after")
    for name in ("norm", "cosine", *(("norm without residuals", "cosine without") if without else ())):
        table.add_column(name, justify="right")
    for i, signal in enumerate(propagation.signals):
        signals = [signal, without[i]] if without else [signal]
        cells = [text for it in signals for text in (f"{it.norm:,.2f}", f"{it.cosine:.3f}")]
        table.add_row("embeddings" if i == 0 else f"layer {i - 1}", *cells)
    console.print(f"Signal propagation, {sequence}:", highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    console.print(
        "norm: of a token's row, Euclidean, mean over tokens; cosine: of two tokens' rows, mean over pairs",
        style="dim",
    )
    if without is None:
        console.print("This model has no residual connections.")


def _describe(shape: manifest_pb2.EncoderShape) -> str:
    sizes = f"{shape.n_layers} layers of d_model {shape.d_model}, {shape.n_heads} heads, d_ff {shape.d_ff}"
    choices = f"norm {shape.norm}, positions {shape.position}, activation {shape.activation}"
    if not shape.n_layers:
        return f"d_model {shape.d_model}, up to {shape.max_sequence_tokens} tokens"
    return f"{sizes}, {choices}, up to {shape.max_sequence_tokens} tokens"


def _parameters_by_layer(manifest: manifest_pb2.Manifest, layers: list[LayerParameters]) -> Table:
    parts = [part.part for part in manifest.parameters if any(part.part in layer.counts for layer in layers)]
    totals = {part: sum(layer.counts.get(part, 0) for layer in layers) for part in parts}
    total = sum(totals.values())
    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("parameters", footer="total\nshare")
    for part in parts:
        table.add_column(part, footer=f"{totals[part]:,}\n{100 * totals[part] / total:.1f} %", justify="right")
    table.add_column("total", footer=f"{total:,}\n100.0 %", justify="right")
    for layer in layers:
        counts = [f"{layer.counts[part]:,}" if part in layer.counts else "" for part in parts]
        table.add_row(layer.name, *counts, f"{layer.total:,}")
    return table


def _print_facts(facts: list[tuple[str, str]], console: Console) -> None:
    for name, value in facts:
        # Never folded to the width of a terminal: names and paths are there to be copied.
        console.print(f"{name:<13}{printable(value)}", soft_wrap=True, highlight=False, markup=False)


def _parity(manifest: manifest_pb2.Manifest) -> str:
    parity = manifest.parity
    if not parity.tolerance and not parity.required_min_cosine:
        return "not compared with PyTorch: the model came as ONNX"
    if parity.required_min_cosine:
        return f"least cosine similarity {parity.min_cosine:.6g}, required {parity.required_min_cosine}"
    said = f"max error {parity.max_relative_error:.1e}, tolerance {parity.tolerance:.1e}"
    if not parity.float32_error:
        return f"{said}, from PyTorch in float32: the model does not run in float64"
    said = f"{said}, from PyTorch in float64; PyTorch's own float32 {parity.float32_error:.1e}"
    if parity.float32_error > _FAR_OFF:
        said += (
            f". float32 itself is off by more than {_FAR_OFF:.0e} for this model: its rows differ by as much from one "
            "CPU or library to another"
        )
    return said


def _expected(exported: Exported) -> str:
    its = exported.manifest.parity
    if not its.expected_rows:
        return (
            "no rows given, so the description (norm, activation, positions, ...) was not checked against the module "
            "that was trained; --expect does that"
        )
    said = f"{its.expected_rows} rows as in {exported.expected}"
    if its.min_expected_cosine:
        return f"{said}, least cosine similarity {its.min_expected_cosine:.6g}"
    return f"{said}, max error {its.max_expected_error:.1e}, tolerance {its.tolerance or BOUNDS['float32'].error:.1e}"


def _pipeline(exported: Exported) -> str:
    its = exported.manifest.parity
    said = (
        f"{its.pipeline_texts} texts as {exported.compared_with} computes them, max error {its.max_pipeline_error:.1e}"
    )
    if its.min_pipeline_cosine:
        said += f", least cosine similarity {its.min_pipeline_cosine:.6g}"
    if its.maxsim_tolerance:
        share = f"{its.max_maxsim_error:.1e} of its query's best, tolerance {its.maxsim_tolerance:g}"
        said += f", of a MaxSim score {share}"
    return said


def _padding(parity: manifest_pb2.Parity) -> str:
    if parity.required_min_padding_cosine:
        return f"least cosine similarity {parity.min_padding_cosine:.6g}, required {parity.required_min_padding_cosine}"
    return f"max error {parity.max_padding_error:.1e}, tolerance {parity.padding_tolerance:.1e}"
