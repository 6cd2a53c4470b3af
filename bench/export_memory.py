"""Measures the CPU seconds and the memory of an export.

    python bench/export_memory.py [--size base|large ...] [--route ROUTE ...] [--precision PRECISION ...] [--json FILE]

The model is BERT in the size of bert-base-uncased or bert-large-uncased, with random weights. Each export runs in a new
process with one thread of PyTorch. The measured memory is the peak memory minus the memory after the imports. The peak
comes from the Linux kernel and includes mapped files. The program runs on Linux only.

The bound of the measured memory is 3 times the size of the float32 weights, plus 500 MB. If an export exceeds the
bound, the exit status is 1.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.machine import describe_run, write_report

SIZES: dict[str, dict[str, int]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
# A route is a way to export: `hf --via transformers`, `hf --via onnx`, `checkpoint`, or the function export_module.
ROUTES = ("transformers", "onnx", "checkpoint", "module")
PRECISIONS = ("float32", "float16", "int8")
BOUND_OF_WEIGHTS, BOUND_MB = 3, 500


def write_sources(size: str, folder: Path) -> int:
    """Write the input files of all routes into a folder. Return the size of the float32 weights in bytes."""
    import torch
    import transformers
    from harness.sides import write_padded_onnx

    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES[size])
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(995))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "onnx").mkdir()
    write_padded_onnx(model, folder / "onnx/model.onnx")
    layer = torch.nn.TransformerEncoderLayer(
        config.hidden_size, config.num_attention_heads, config.intermediate_size, activation="gelu", batch_first=True
    )
    encoder = torch.nn.TransformerEncoder(layer, config.num_hidden_layers).state_dict()
    table = torch.randn(config.vocab_size, config.hidden_size)  # (vocab, d_model)
    torch.save(encoder | {"embedding.weight": table}, folder / "checkpoint.pt")
    return (folder / "model.safetensors").stat().st_size


def prepare_export(route: str, precision: Any, source: Path, models: Path) -> Callable[[], object]:
    """Import everything that an export needs, and return a function that exports."""
    import torch
    import transformers.models.bert.modeling_bert

    import encserve_export.cli  # noqa: F401
    from encserve_export import Target, export_checkpoint, export_hf, export_module

    target = Target(model_repository=models, name="bert", version=f"{route}-{precision}")
    if route == "checkpoint":
        heads = transformers.BertConfig.from_pretrained(source).num_attention_heads
        fields = {"n_heads": heads, "norm": "post", "activation": "gelu", "position": "sinusoidal"}
        fields |= {"scale_embedding": False}
        return partial(export_checkpoint, source / "checkpoint.pt", target, fields=fields, precision=precision)
    if route != "module":
        via: Any = route
        return partial(export_hf, source, target, via=via, precision=precision)

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertModel.from_pretrained(source, attn_implementation="eager")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            return rows

    return lambda: export_module(
        Rows().eval(), target, configuration={"of": "bench"}, vocab_size=1000, precision=precision
    )


def _measure(route: str, precision: str, source: Path, models: Path) -> tuple[float, float]:
    export = prepare_export(route, precision, source, models)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before, began = _memory_mb("VmRSS"), time.process_time()
    export()
    return time.process_time() - began, _memory_mb("VmHWM") - before


def _memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(value) * 1024 / 1e6


def measure_export(route: str, precision: str, source: Path) -> tuple[float, float]:
    """Export in a new process. Return the CPU seconds, and the measured memory in MB. An MB is 10⁶ bytes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the new processes
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=source) as models, ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(_measure, route, precision, source, Path(models)).result()


def measure_size(
    size: str, routes: Sequence[str], precisions: Sequence[str]
) -> tuple[float, list[dict[str, str | float]]]:
    """Measure the exports of one size, and print a table.

    Return the size of the float32 weights in MB, and the figures of each export.
    """
    found: list[dict[str, str | float]] = []
    with tempfile.TemporaryDirectory() as folder:
        weights_mb = write_sources(size, Path(folder)) / 1e6
        print(f"BERT-{size}: {weights_mb:,.0f} MB of float32 weights; the bound is {bound_mb(weights_mb):,.0f} MB\n")
        print("| route | precision | CPU seconds | peak minus imports, MB | ratio to weights |\n|---|---|---|---|---|")
        for route in routes:
            for precision in precisions:
                seconds, peak_mb = measure_export(route, precision, Path(folder))
                cells = route, precision, f"{seconds:.0f}", f"{peak_mb:,.0f}", f"{peak_mb / weights_mb:.1f}"
                print(f"| {' | '.join(cells)} |", flush=True)
                entry = {"size": size, "route": route, "precision": precision}
                found.append(entry | {"cpu_seconds": seconds, "peak_mb": peak_mb})
    return weights_mb, found


def bound_mb(weights_mb: float) -> float:
    """Return the largest allowed memory of an export, in MB."""
    return BOUND_OF_WEIGHTS * weights_mb + BOUND_MB


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every export, print a table for each size, and write the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["base"])
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = describe_run() | {"weights_mb": {}, "exports": []}
    for size in options.size:
        report["weights_mb"][size], found = measure_size(size, options.route, options.precision)
        report["exports"] += found
    if options.json:
        write_report(options.json, report)
    for entry in report["exports"]:
        if entry["peak_mb"] > (bound := bound_mb(report["weights_mb"][entry["size"]])):
            sys.exit(f"an export took more than {bound:,.0f} MB of memory; see the table")


if __name__ == "__main__":
    main()
