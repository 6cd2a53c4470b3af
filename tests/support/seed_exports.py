"""Exports checkpoints of a seed layout, in full size and with random weights as its own code draws them.

    python seed_exports.py LAYOUT SEEDS OPTIMISED THREADS LONGEST

SEEDS is a list such as 0,1,2. OPTIMISED is 1 or 0: whether ONNX Runtime rewrites graphs. The instructions that PyTorch
may use are those of ATEN_CPU_CAPABILITY. It prints how far ONNX Runtime and PyTorch are from float64.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from safetensors.torch import save_file
from state_dicts import state_dict
from torch import nn

from encserve_export import Encoder, EncoderConfig, Target, export_checkpoint
from encserve_export.ground.errors import ParityError

_PLAIN = {"scale_embedding": False, "norm": "post", "activation": "relu", "position": "sinusoidal", "vocab_size": 1000}
_WIDE = {"d_model": 512, "n_heads": 8, "d_ff": 2048}
CONFIGS: dict[str, dict[str, Any]] = {
    "per-head-linears": {**_WIDE, "n_layers": 8},
    "raw-matrices": {
        "d_model": 16,
        "n_heads": 2,
        "d_ff": 64,
        "n_layers": 2,
        "attention_bias": False,
        "scale_embedding": True,
    },
    "fused-qkv": {**_WIDE, "n_layers": 5, "merge_heads": "reshape"},
    "attention-only": {
        "d_model": 512,
        "n_heads": 8,
        "d_ff": 0,
        "n_layers": 1,
        "attention_bias": False,
        "norm": "none",
        "residual": False,
    },
    "split-qkv": {**_WIDE, "n_layers": 6, "activation": "gelu", "final_norm": True, "scale_embedding": True},
    "torch-native": {**_WIDE, "n_layers": 6, "norm": "pre", "activation": "gelu", "final_norm": True},
}


def draw(layout: str, encoder: Encoder, seed: int) -> None:
    """Fills an encoder with the numbers that the layout's code begins with."""
    torch.manual_seed(seed)
    scale = {"attention-only": 1.0, "raw-matrices": 0.1}.get(layout)
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, nn.Linear) and scale is not None:
                module.weight.normal_(std=scale)
            elif isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()
        if layout == "raw-matrices":
            encoder.embeddings.tokens.weight.normal_(std=0.1)


def export(layout: str, seed: int, longest: int) -> None:
    """Exports one, and prints what was found."""
    fields = {**_PLAIN, **CONFIGS[layout], "max_sequence_tokens": longest}
    encoder = Encoder(EncoderConfig.from_mapping(fields)).eval().requires_grad_(False)
    draw(layout, encoder, seed)
    tensors = state_dict(layout, encoder) | {"embedding.weight": encoder.embeddings.tokens.weight.clone()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.safetensors")
        save_file(tensors, path)
        target = Target(model_repository=Path(folder, "models"), name=layout)
        parity = export_checkpoint(path, target, fields=fields, layout=layout).manifest.parity
    found = f"ONNX Runtime {parity.max_relative_error:.1e}, PyTorch {parity.float32_error:.1e}"
    sys.stdout.write(f"{layout}, seed {seed}, {torch.backends.cpu.get_cpu_capability()}: {found}\n")


def main() -> None:
    layout, seeds, optimised, threads, longest = sys.argv[1:]
    open_real = onnxruntime.InferenceSession

    def opened(graph: Any, options: onnxruntime.SessionOptions, **rest: Any) -> onnxruntime.InferenceSession:
        options.intra_op_num_threads = int(threads)
        if not int(optimised):
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return open_real(graph, options, **rest)

    onnxruntime.InferenceSession = opened
    torch.set_num_threads(int(threads))
    warnings.simplefilter("ignore")
    failed = False
    for seed in map(int, seeds.split(",")):
        try:
            export(layout, seed, int(longest))
        except ParityError as error:
            failed = True
            sys.stderr.write(f"{layout}, seed {seed}: {error}\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
