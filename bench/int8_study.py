"""Compares ways of computing an encoder's linear layers in 8 bits, on the CPU and on real text.

    python bench/int8_study.py CHECKPOINT [--rounds 6] [--sequences 192] [--only NAME ...]

CHECKPOINT is a directory in the layout of Hugging Face, with tokenizer.json. Needs encserve-export, encserve-server,
and sympy for ONNX Runtime's quantizer. Texts are docstrings of Python's own library, cut to the lengths that
lengths.json has, in batches as the scheduler makes them of 64 that wait. Rounds are interleaved. Prints, for each way,
the speed as a ratio to float32 (by the shortest time of each batch over the rounds, since what else the machine does
only makes it longer), the least and the mean cosine similarity of a token's row and
float32's, the least of a sequence alone and the same one in its batch, and the size of the model.
"""

import argparse
import importlib
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from comparison.texts import open_tokenizer
from comparison.workload import LENGTHS, draw_lengths, read_histogram
from engines import as_batches
from export_variants import open_session
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from rich.console import Console
from rich.table import Table

from encserve_export import graph, int8
from encserve_export.layouts import hf_bert
from encserve_export.weights import read_json, read_weights

Ids = npt.NDArray[np.int64]
Batch = list[Ids]
Change = Callable[[Path, Path], None]  # the float32 file -> another file
WAITING, BUDGET = 64, 512
MODULES = (
    "argparse", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "email", "functools",
    "http.client", "inspect", "json", "logging", "os", "pathlib", "pickle", "random", "re", "shutil", "socket",
    "sqlite3", "ssl", "string", "subprocess", "tarfile", "tempfile", "threading", "turtle", "unittest",
    "urllib.request", "zipfile",
)  # fmt: skip


# What is run.


def texts() -> Iterator[str]:
    """Docstrings of Python's own library."""
    seen: set[str] = set()
    for name in MODULES:
        for _, member in sorted(vars(importlib.import_module(name)).items()):
            parts = [part for _, part in sorted(vars(member).items())] if inspect.isclass(member) else []
            for documented in (member, *parts):
                text = getattr(documented, "__doc__", None)
                if isinstance(text, str) and len(text) > 60 and text not in seen:
                    seen.add(text)
                    yield text


def make_batches(checkpoint: Path, count: int) -> list[Batch]:
    """Real text of real lengths, in the batches that the scheduler would make."""
    tokenizer = open_tokenizer(checkpoint / "tokenizer.json")
    ids = [token for text in texts() for token in tokenizer.encode(text, add_special_tokens=False).ids]
    first, last = tokenizer.encode("").ids
    histogram, _ = read_histogram(LENGTHS)
    sequences, place = [], 0
    for length in draw_lengths(histogram, count=count, seed=0, longest=256):
        inner = max(length - 2, 0)
        place = place if place + inner <= len(ids) else 0
        sequences.append(np.array([first, *ids[place : place + inner], last]))
        place += inner
    return as_batches(sequences, BUDGET, 1)


def feed(batch: Sequence[Ids]) -> dict[str, Ids]:
    """A batch padded on the right, and its mask."""
    mask = (np.arange(max(map(len, batch))) < np.array([[len(it)] for it in batch])).astype(np.int64)  # (batch, seq)
    ids = np.zeros_like(mask)  # (batch, seq)
    ids[mask == 1] = np.concatenate(batch)
    return {graph.INPUT_IDS: ids, graph.ATTENTION_MASK: mask}


def cosines(got: Any, want: Any) -> Any:
    """The cosine similarity of each row: (tokens, d_model) twice -> (tokens)."""
    got, want = got.astype(np.float64), want.astype(np.float64)  # (tokens, d_model)
    return (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)  # (tokens)


def rows(session: onnxruntime.InferenceSession, batches: Sequence[Sequence[Ids]]) -> list[Any]:
    """The rows of each sequence, (seq, d_model)."""
    return [
        out[: len(it)]
        for batch in batches
        for it, out in zip(batch, session.run([graph.OUTPUT], feed(batch))[0], strict=True)
    ]


# Ways of computing in 8 bits.


def dynamic(*, per_channel: bool) -> Change:
    """ONNX Runtime's dynamic quantization: one scale for a whole batch, taken when it runs."""

    def change(source: Path, path: Path) -> None:
        quantize_dynamic(source, path, op_types_to_quantize=["Gemm", "MatMul"], per_channel=per_channel)

    return change


class Reader(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
    """Gives batches to calibrate by, all of one shape: the histograms of the package know no other."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        """Takes the text of the batches."""
        ids = np.concatenate([it for batch in batches for it in batch])
        cut = ids[: len(ids) // 256 * 256].reshape(-1, 4, 64)  # (batches, batch, seq)
        self._feeds = iter([feed(list(it)) for it in cut])

    def get_next(self) -> Any:
        """The next batch, or None after the last."""
        return next(self._feeds, None)


def static(batches: Sequence[Batch], method: CalibrationMethod, *, without: str = "-") -> Change:
    """ONNX Runtime's static quantization: scales fixed at export, here by text that is not measured."""

    def change(source: Path, path: Path) -> None:
        kept = [node.name for node in onnx.load(source, load_external_data=False).graph.node if without in node.name]
        fixed = {"ActivationSymmetric": False, "CalibPercentile": 99.99}
        quantize_static(
            source,
            path,
            Reader(batches),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Gemm"],
            per_channel=True,
            nodes_to_exclude=kept,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=method,
            extra_options=fixed,
        )

    return change


def blocks(block_size: int, accuracy_level: int) -> Change:
    """ONNX Runtime's MatMulNBits with 8 bits: a scale for each block of a weight's row."""

    def change(source: Path, path: Path) -> None:
        model = onnx.load(source)
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type != "Gemm":
                continue
            weight = weights[node.input[1]]  # (n, k)
            n, k = weight.shape
            cut = weight.reshape(-1, block_size)  # (n·k / block_size, block_size)
            rounded, scales = int8.quantize_rows(cut)
            stored = (rounded.astype(np.int16) + 128).astype(np.uint8).reshape(n, k // block_size, block_size)
            names = [f"{node.input[1]}.{part}" for part in ("blocks", "scales")]
            parts = zip((stored, scales.reshape(n, -1)), names, strict=True)
            model.graph.initializer.extend(numpy_helper.from_array(values, name) for values, name in parts)
            sizes = {"K": k, "N": n, "bits": 8, "block_size": block_size, "accuracy_level": accuracy_level}
            inputs = [node.input[0], *names, "", "", node.input[2]]
            domain = "com.microsoft"
            node.CopyFrom(helper.make_node("MatMulNBits", inputs, list(node.output), node.name, domain=domain, **sizes))
        save(model, path)

    return change


def standard_product(source: Path, path: Path) -> None:
    """Replaces ONNX Runtime's scaled product by ONNX's own operators."""
    model = onnx.load(source)
    nodes = []
    for node in model.graph.node:
        if node.op_type != "MatMulIntegerToFloat":
            nodes.append(node)
            continue
        x, weight, _, scales, zero = node.input
        total, cast = f"{node.name}/sum", f"{node.name}/cast"
        nodes.append(helper.make_node("MatMulInteger", [x, weight, zero], [total], total))
        nodes.append(helper.make_node("Cast", [total], [cast], cast, to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [cast, scales], list(node.output), node.name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    save(model, path)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model without the weights that it no longer uses."""
    used = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    if all(opset.domain != "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)


def write_all(checkpoint: Path, folder: Path, calibration: Sequence[Batch], only: Sequence[str]) -> dict[str, Path]:
    """Writes the model in every way."""
    settings = read_json(checkpoint / "config.json")
    encoder = hf_bert.read_layout(settings).load(hf_bert.plain_names(read_weights(checkpoint).tensors))
    ours: dict[str, dict[str, Any]] = {
        "exported": {},
        "exported, no smoothing": {"_SMOOTHED": ()},
        "exported, nothing in float32": {"_MAX_ERROR": 9.0},
        "exported, all layers with 0 in the middle": {"_LEAST_OF": dict.fromkeys(int8._LEAST_OF)},
    }
    changes: dict[str, Change] = {
        "dynamic, per tensor": dynamic(per_channel=False),
        "dynamic, per channel": dynamic(per_channel=True),
        **{f"MatMulNBits, blocks of {size}, level 4": blocks(size, 4) for size in (32, 64, 128)},
        "MatMulNBits, blocks of 32, level 0": blocks(32, 0),
        "static, extremes": static(calibration, CalibrationMethod.MinMax),
        "static, 99.99 %": static(calibration, CalibrationMethod.Percentile),
        "static, entropy": static(calibration, CalibrationMethod.Entropy),
        "static, extremes, without outer": static(calibration, CalibrationMethod.MinMax, without="/outer/"),
    }
    paths = {}

    def make(name: str, precision: Any, **patches: Any) -> Path:
        (folder / name).mkdir()
        with mock.patch.multiple(int8, _DOMAIN=int8._DOMAIN, **patches):
            paths[name] = graph.write_graphs(encoder, folder / name, precision).files[0]
        return paths[name]

    source = make("float32", "float32")
    for name, patches in ours.items():
        if name in only or not only:
            make(name, "int8", **patches)
    if (name := "exported, standard operators") in only or not only:
        paths[name] = folder / "standard.onnx"
        standard_product(paths.get("exported") or make("exported", "int8"), paths[name])
    for i, (name, change) in enumerate(changes.items()):
        if name in only or not only:
            paths[name] = folder / f"{i}.onnx"
            change(source, paths[name])
    return paths


def size_mib(path: Path) -> float:
    """A model's size with its weights."""
    return sum(it.stat().st_size for it in (path, path.with_name(graph.DATA_FILE)) if it.exists()) / 2**20


def speeds(sessions: dict[str, onnxruntime.InferenceSession], batches: list[Batch], rounds: int) -> dict[str, float]:
    """How many times as fast as the first each is, by the shortest time of each batch."""
    order = np.random.default_rng(1)
    seconds = {name: np.full(len(batches), np.inf) for name in sessions}
    for _ in range(rounds):
        for i, batch in enumerate(batches):
            inputs = feed(batch)
            for name in order.permutation(list(sessions)):
                start = time.perf_counter()
                sessions[name].run(None, inputs)
                seconds[name][i] = min(seconds[name][i], time.perf_counter() - start)
    first = next(iter(seconds.values())).sum()
    return {name: float(first / its.sum()) for name, its in seconds.items()}


def main() -> None:
    """Writes, checks and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[])
    arguments = parser.parse_args()
    made = make_batches(arguments.checkpoint, arguments.sequences + WAITING)
    # The last window is for calibration.
    count, calibration = arguments.sequences, list[Batch]()
    while sum(map(len, calibration)) < WAITING:
        calibration.append(made.pop())
    with tempfile.TemporaryDirectory() as name:
        paths = write_all(arguments.checkpoint, Path(name), calibration, arguments.only)
        sessions = {name: open_session(path, arguments.threads) for name, path in paths.items()}
        sizes = {name: size_mib(path) for name, path in paths.items()}
    table = Table(title=f"{count} sequences, {sum(len(it) for batch in made for it in batch):,} tokens", box=None)
    for column in ("way", "speed", "min. cosine", "mean", "min. alone", "MiB"):
        table.add_column(column, justify="left" if column == "way" else "right")
    ratios = speeds(sessions, made, arguments.rounds)
    want = rows(sessions["float32"], made)
    for name, session in sessions.items():
        together = rows(session, made)
        alone = rows(session, [[it] for batch in made for it in batch])
        against = np.concatenate([cosines(*pair) for pair in zip(together, want, strict=True)])
        neighbours = np.concatenate([cosines(*pair) for pair in zip(together, alone, strict=True)])
        figures = (ratios[name], against.min(), against.mean(), neighbours.min(), sizes[name])
        table.add_row(name, *(f"{it:.{digits}f}" for it, digits in zip(figures, (2, 4, 4, 4, 1), strict=True)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
