"""Measures what exports take: CPU seconds, and its peak memory above that of the process after imports.

    python bench/export_memory.py [--model base|large] [--route ROUTE ...] [--precision PRECISION ...] [--shares]

The model is BERT in the size of bert-base-uncased or bert-large-uncased with random weights; each export is a process
of its own. The bound is 3 times the weights in float32 and 500 MB. Linux only: the peak is the kernel's, of all memory
that the process has at once, mapped files too. --shares measures with a profiler which part of the time each check
takes, in seconds; a check that runs inside another counts in both.
"""

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from encserve_export.ground.precision import Precision

_SIZES = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
# The first three are ways of `hf`; "static" is a table of as many numbers.
_ROUTES = ("own", "onnx", "transformers", "checkpoint", "module", "static")
_PRECISIONS = ("float32", "float16", "int8")
_OF_WEIGHTS, _AND_MB = 3, 500
# The functions whose time --shares shows, by file.
_CHECKS = {
    "padding in PyTorch": ("check/agreement.py", "check_padding"),
    "our own encoder with transformers": ("routes/hf.py", "_rows_of_transformers"),
    "rows in PyTorch, with float64": ("check/agreement.py", "_reference"),
    "rows in ONNX Runtime": ("check/agreement.py", "_check"),
    "inspection": ("check/agreement.py", "check_inspection"),
    "texts in sentence-transformers": ("check/pipeline.py", "prepare_comparison"),
    "texts": ("check/pipeline.py", "_compare"),
    "space_id": ("bundle/space.py", "digest_model"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=_SIZES, default="base")
    parser.add_argument("--route", nargs="+", choices=_ROUTES, default=_ROUTES[:3])
    parser.add_argument("--precision", nargs="+", choices=_PRECISIONS, default=_PRECISIONS)
    parser.add_argument("--shares", action="store_true", help="measure the checks, not the memory")
    parser.add_argument("--export", nargs=2, metavar=("ROUTE", "PRECISION"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to make the model and the bundles; a temporary folder")
    options = parser.parse_args(arguments)
    if options.export:
        route, precision = options.export
        if route == "make":
            _make(options.model, options.folder / "checkpoint", precision)
        else:
            (_profile if options.shares else _export)(options.folder, route, precision)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for route in options.route:
            _in_a_process(["--model", options.model, "--folder", name, "--export", "make", route])
        weights = (folder / "checkpoint" / "model.safetensors").stat().st_size / 1e6
        if options.shares:
            print(f"| route | precision | all | {' | '.join(_CHECKS)} |\n|{'---|' * (3 + len(_CHECKS))}")
            for route in options.route:
                for precision in options.precision:
                    asked = ["--model", options.model, "--folder", name, "--export", route, precision, "--shares"]
                    print(_in_a_process(asked).splitlines()[-1], flush=True)
            return
        bound = _OF_WEIGHTS * weights + _AND_MB
        print(f"BERT-{options.model}: {weights:,.0f} MB of weights in float32; at most {bound:,.0f} MB are allowed\n")
        print("| route | precision | CPU seconds | peak above imports, MB | of the weights |")
        print("|---|---|---|---|---|")
        for route in options.route:
            for precision in options.precision:
                found = _in_a_process(["--model", options.model, "--folder", name, "--export", route, precision])
                if not found:
                    parser.exit(1, f"the export by {route} in {precision} failed\n")
                seconds, peak = map(float, found.split()[-2:])
                said = "" if peak <= bound else " **over**"
                row = (route, precision, f"{seconds:.0f}", f"{peak:,.0f}{said}", f"{peak / weights:.1f}")
                print(f"| {' | '.join(row)} |", flush=True)


def _in_a_process(arguments: list[str]) -> str:
    found = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    return found.stdout if found.returncode == 0 else ""


def _make(size: str, folder: Path, route: str) -> None:
    """What a route exports, and a checkpoint of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**_SIZES[size])
    if not folder.exists():
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(995))]
        transformers.BertModel(config).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    if route == "onnx":
        _write_onnx(transformers.BertModel.from_pretrained(folder).eval(), folder / "onnx")
    elif route == "checkpoint":
        layer = torch.nn.TransformerEncoderLayer(
            config.hidden_size, config.num_attention_heads, config.intermediate_size, activation="gelu"
        )
        stack = torch.nn.TransformerEncoder(layer, config.num_hidden_layers).state_dict()
        table = torch.randn(config.vocab_size, config.hidden_size)
        torch.save(stack | {"embedding.weight": table}, folder / "checkpoint.pt")
    elif route == "static":
        _write_static(
            folder / "static",
            (folder / "model.safetensors").stat().st_size // 4 // config.hidden_size,
            config.hidden_size,
        )


def _write_static(folder: Path, rows: int, width: int) -> None:
    """A StaticEmbedding of so many tokens."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"word{i}": i for i in range(1, rows)}}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=width)], device="cpu").save_pretrained(
        str(folder)
    )


def _write_onnx(model: Any, folder: Path) -> None:
    """The ONNX file that PyTorch makes of a model of transformers."""
    import torch

    folder.mkdir()
    ids = torch.zeros((2, 7), dtype=torch.int64)  # (batch, seq)
    names = ["input_ids", "attention_mask"]

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return rows

    torch.onnx.export(
        Rows(),
        (ids, torch.ones_like(ids)),
        str(folder / "model.onnx"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "seq"} for name in [*names, "last_hidden_state"]},
        opset_version=20,
        dynamo=False,
    )


def _imported(folder: Path, route: str, precision: str) -> Callable[[], object]:
    """The export, once what it needs is imported."""
    import transformers.models.bert.modeling_bert  # noqa: F401

    import encserve_export.cli  # noqa: F401
    from encserve_export import Target, export_checkpoint, export_hf

    target = Target(model_repository=folder / "models", name="bert", version=f"{route}-{precision}", overwrite=True)
    directory, chosen = folder / "checkpoint", cast("Precision", precision)
    if route == "module":
        return partial(_export_module, directory, target, chosen)
    if route == "checkpoint":
        config = json.loads((directory / "config.json").read_text())
        fields = {"n_heads": config["num_attention_heads"], "norm": "post", "activation": "gelu"}
        fields |= {"position": "sinusoidal", "scale_embedding": False}
        return partial(export_checkpoint, directory / "checkpoint.pt", target, fields=fields, precision=chosen)
    if route == "static":
        return partial(export_hf, directory / "static", target)
    return partial(export_hf, directory, target, via=route, precision=chosen)  # type: ignore[arg-type]


def _export_module(directory: Path, target: Any, precision: Any) -> None:
    """The same model as a module of somebody's own."""
    import torch
    import transformers

    from encserve_export import export_module

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertModel.from_pretrained(directory, attn_implementation="eager")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            return rows

    export_module(Rows().eval(), target, configuration={"of": "bench"}, vocab_size=1000, precision=precision)


def _export(folder: Path, route: str, precision: str) -> None:
    export = _imported(folder, route, precision)
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak over
    before, began = _memory_mb("VmRSS"), time.process_time()
    export()
    print(time.process_time() - began, _memory_mb("VmHWM") - before)


def _profile(folder: Path, route: str, precision: str) -> None:
    export = _imported(folder, route, precision)
    profile = cProfile.Profile(time.process_time)
    profile.runcall(export)
    times = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = [max(cumulative for *_, cumulative, _ in times.values())]
    for file, function in _CHECKS.values():
        found.append(sum(its[3] for (path, _, name), its in times.items() if name == function and path.endswith(file)))
    print(f"| {route} | {precision} | {' | '.join(f'{it:.1f}' for it in found)} |")


def _memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(value) * 1024 / 1e6


if __name__ == "__main__":
    main()
