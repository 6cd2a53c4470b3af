"""Shows an export's result as a table."""

from rich.console import Console
from rich.table import Table

from encserve_export import graph, verify
from encserve_export.export import Exported
from encserve_proto.v1 import manifest_pb2


def show(exported: Exported, console: Console) -> None:
    """Prints parameters by part, file sizes, parity, and where the bundle is."""
    console.print(_parameters(exported.manifest))
    console.print()
    for name, value in _facts(exported):
        # Never folded to the width of a terminal: the path is there to be copied.
        console.print(f"{name:<13}{value}", soft_wrap=True, highlight=False, markup=False)


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
    size = sum(file.size_bytes for file in manifest.files if file.path.startswith(graph.FILE))
    return [
        ("model size", f"{size / 2**20:,.1f} MiB, opset {manifest.graph.opset}"),
        ("parity", _parity(manifest)),
        ("padding", f"max error {parity.max_padding_error:.1e}, tolerance {verify.PADDING_TOLERANCE:.1e}"),
        ("cases", f"{len(parity.cases)} batches, lengths 1 to {manifest.encoder.max_sequence_tokens}"),
        ("fingerprint", manifest.fingerprint),
        ("bundle", str(exported.path)),
    ]


def _parity(manifest: manifest_pb2.Manifest) -> str:
    if manifest.source.kind == "onnx":
        return "not compared with PyTorch: the model came as ONNX"
    return f"max error {manifest.parity.max_relative_error:.1e}, tolerance {manifest.parity.tolerance:.1e}"
