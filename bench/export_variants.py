"""Compares ways of writing an encoder as ONNX, by what ONNX Runtime's CPU provider makes of them.

    python bench/export_variants.py CHECKPOINT [--rounds 20] [--threads 2] [--only NAME ...]

CHECKPOINT is a directory in the layout of Hugging Face. Needs encserve-export, sympy, and onnxscript for the variants
of the newer exporter. Rounds are interleaved: in each, every variant runs every batch of a workload once, in random
order, so that a slow moment of the machine hits all of them. Prints the median time of a workload, and in brackets the
median over rounds of the ratio to the first variant, which is the graph that encserve-export writes.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions
from torch import Tensor
from torch.nn import functional

from encserve_export import graph
from encserve_export.encoder import Encoder, Padding, SelfAttention
from encserve_export.layouts import hf_bert
from encserve_export.verify import relative_error
from encserve_export.weights import read_weights

Feed = dict[str, npt.NDArray[np.int64]]
BUDGET = 512  # padded tokens in a batch
PENDING = 32  # sequences that wait when a batch is made
NAMES: dict[str, Any] = {"input_names": [graph.INPUT_IDS, graph.ATTENTION_MASK], "output_names": [graph.OUTPUT]}
EXAMPLE = (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [1, 1, 0]]))


# Other ways of writing the encoder. Each replaces a method of Padding or SelfAttention.

NO_WEIGHTS = torch.empty(0)  # in place of the attention weights, which the graph that is served does not give


def keep_rows(_: Padding, x: Tensor) -> Tensor:
    """Leaves padding in: all layers run on (batch·seq, n)."""
    return x


def keep_shape(padding: Padding, x: Tensor) -> Tensor:
    """Leaves padding in: all layers run on (batch, seq, n), where a linear layer is a MatMul and an Add."""
    return x.reshape(padding.bias.shape[0], padding.bias.shape[3], -1)  # (batch, seq, n)


def heads_of(attention: SelfAttention, x: Tensor, padding: Padding) -> Tensor:
    """(batch·seq, d_model) -> (batch, heads, seq, d_k)."""
    bias = padding.bias  # (batch, 1, 1, seq)
    return x.reshape(bias.shape[0], bias.shape[3], attention.n_heads, attention.d_k).transpose(1, 2)


def attend_separately(self: SelfAttention, x: Tensor, padding: Padding) -> tuple[Tensor, Tensor]:
    """Makes Q, K and V by a linear layer each."""
    layers = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
    q, k, v = (heads_of(self, padding.restore(functional.linear(x, *layer)), padding) for layer in layers)
    heads = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.d_k) + padding.bias, dim=-1) @ v
    y: Tensor = self.output(padding.remove(heads.transpose(1, 2).reshape(-1, self.d_model)))  # (tokens, d_model)
    return y, NO_WEIGHTS


def attend_sdpa(self: SelfAttention, x: Tensor, padding: Padding) -> tuple[Tensor, Tensor]:
    """Calls PyTorch's own attention, which becomes one Attention operator from opset 23 on."""
    parts = torch.split(padding.restore(self.qkv(x)), self.d_model, dim=-1)
    q, k, v = (heads_of(self, part, padding) for part in parts)
    # ONNX Runtime's CPU Attention does not broadcast the mask over queries.
    bias = padding.bias.expand(-1, -1, padding.bias.shape[3], -1)  # (batch, 1, seq, seq)
    heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    y: Tensor = self.output(padding.remove(heads.transpose(1, 2).reshape(-1, self.d_model)))  # (tokens, d_model)
    return y, NO_WEIGHTS


class ContribAttention(torch.autograd.Function):
    """ONNX Runtime's own MultiHeadAttention operator, which no other runtime has."""

    @staticmethod
    def forward(_: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, n_heads: int) -> Tensor:
        """Has the result's shape, which is all that tracing needs."""
        return q.clone()

    @staticmethod
    def symbolic(g: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, n_heads: int) -> Any:
        """Names the operator."""
        attended = g.op("com.microsoft::MultiHeadAttention", q, k, v, bias, mask, num_heads_i=n_heads)
        attended.setType(q.type())
        return attended


def attend_contrib(self: SelfAttention, x: Tensor, padding: Padding) -> tuple[Tensor, Tensor]:
    """Calls ONNX Runtime's operator, which adds the bias of Q, K and V itself."""
    projected = keep_shape(padding, padding.restore(functional.linear(x, self.qkv.weight)))  # (batch, seq, 3·d_model)
    q, k, v = torch.split(projected, self.d_model, dim=-1)  # (batch, seq, d_model) each
    mask = (padding.bias[:, 0, 0, :] == 0).int()  # (batch, seq)
    heads: Tensor = ContribAttention.apply(q, k, v, self.qkv.bias, mask, self.n_heads)  # type: ignore[no-untyped-call]
    y: Tensor = self.output(padding.remove(heads.reshape(-1, self.d_model)))  # (tokens, d_model)
    return y, NO_WEIGHTS


# Ways of turning it into a file.


def trace(encoder: Encoder, path: Path, opset: int = graph.OPSET) -> None:
    """Uses the tracing exporter, as encserve-export does."""
    axes = {0: "batch", 1: "seq"}
    names = (graph.INPUT_IDS, graph.ATTENTION_MASK, graph.OUTPUT)
    torch.onnx.export(
        encoder, EXAMPLE, path, dynamo=False, opset_version=opset, dynamic_axes=dict.fromkeys(names, axes), **NAMES
    )


def dynamo(encoder: Encoder, path: Path, opset: int = graph.OPSET) -> None:
    """Uses the newer exporter."""
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        encoder,
        EXAMPLE,
        path,
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=(axes, axes),
        external_data=False,
        verbose=False,
        **NAMES,
    )


def dynamo23(encoder: Encoder, path: Path) -> None:
    """Uses the newer exporter with the first opset that has Attention."""
    dynamo(encoder, path, 23)


def trace17(encoder: Encoder, path: Path) -> None:
    """Uses an opset without Gelu."""
    trace(encoder, path, 17)


def fused(encoder: Encoder, path: Path) -> None:
    """Fuses offline what ONNX Runtime's script can fuse."""
    trace(encoder, path)
    options = FusionOptions("bert")
    options.enable_embed_layer_norm = False
    sizes = {"num_heads": encoder.config.n_heads, "hidden_size": encoder.config.d_model}
    model = optimizer.optimize_model(str(path), "bert", opt_level=0, optimization_options=options, **sizes)
    model.save_model_to_file(str(path))


Write = Callable[[Encoder, Path], None]
Replaced = dict[tuple[type, str], Any]
ROWS: Replaced = {(Padding, "remove"): keep_rows, (Padding, "restore"): keep_rows}
SHAPED: Replaced = {(Padding, "remove"): keep_shape, (Padding, "restore"): keep_shape}
VARIANTS: dict[str, tuple[Write, Replaced]] = {
    "exported": (trace, {}),
    "dynamo": (dynamo, {}),
    "padded": (trace, ROWS),
    "padded-3d": (trace, SHAPED),
    "padded-dynamo": (dynamo, ROWS),
    "padded-3d-dynamo": (dynamo, SHAPED),
    "padded-fused": (fused, ROWS),
    "padded-3d-fused": (fused, SHAPED),
    "opset17": (trace17, {}),
    "separate-qkv": (trace, {(SelfAttention, "forward"): attend_separately}),
    "sdpa": (trace, {(SelfAttention, "forward"): attend_sdpa}),
    "attention23": (dynamo23, {(SelfAttention, "forward"): attend_sdpa}),
    "contrib-attention": (trace, {(SelfAttention, "forward"): attend_contrib}),
}


def write_variant(name: str, encoder: Encoder, path: Path) -> None:
    """Writes one variant."""
    write, replaced = VARIANTS[name]
    with ExitStack() as stack:
        for (owner, method), replacement in replaced.items():
            stack.enter_context(mock.patch.object(owner, method, replacement))
        # Both exporters announce what they will change one day.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        write(encoder, path)


# What is run.


def make_feed(lengths: list[int], vocab_size: int, random: np.random.Generator) -> Feed:
    """A batch of random tokens, padded on the right."""
    shape = (len(lengths), max(lengths))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # (batch, seq)
    for row, length in enumerate(lengths):
        ids[row, :length] = random.integers(0, vocab_size, length)
        mask[row, :length] = 1
    return {graph.INPUT_IDS: ids, graph.ATTENTION_MASK: mask}


def mixed_lengths(random: np.random.Generator, n_batches: int) -> list[list[int]]:
    """Batches as a server makes them: of PENDING English-like lengths, neighbours by length within BUDGET."""
    batches = []
    for _ in range(n_batches):
        pending = sorted(np.clip(random.lognormal(math.log(28), 0.6, PENDING).astype(int), 5, 256).tolist())
        start = int(random.integers(0, PENDING))
        batch = [pending[start]]
        for length in pending[start + 1 :]:
            if length * (len(batch) + 1) > BUDGET:
                break
            batch.append(length)
        batches.append(batch)
    return batches


def workloads(vocab_size: int, longest: int) -> dict[str, list[Feed]]:
    """Batches by the name of their workload."""
    random = np.random.default_rng(0)
    full = [[length] * (BUDGET // length) for length in (16, 32, 64, 128, 256)]
    single = [[length] for length in (5, 9, 16, 24, 40, 64, 100, 160, 256)]
    lengths = {"mixed": mixed_lengths(random, 10), "no padding": full, "single": single, "short": [[5]] * 5}
    return {
        name: [make_feed([min(n, longest) for n in batch], vocab_size, random) for batch in batches]
        for name, batches in lengths.items()
    }


def open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Loads a variant as a server would."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # The threads of one variant must not go on spinning while the next one is measured.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def largest_difference(a: onnxruntime.InferenceSession, b: onnxruntime.InferenceSession, feeds: list[Feed]) -> float:
    """The largest relative difference of a token's row."""
    errors = []
    for feed in feeds:
        real = feed[graph.ATTENTION_MASK] == 1
        errors.append(relative_error(a.run(None, feed)[0][real], b.run(None, feed)[0][real]))
    return max(errors)


def measure(
    sessions: dict[str, onnxruntime.InferenceSession], feeds: list[Feed], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round, by variant."""
    order = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        totals = dict.fromkeys(sessions, 0.0)
        for feed in feeds:
            for name in order.permutation(list(sessions)):
                start = time.perf_counter()
                sessions[name].run(None, feed)
                totals[name] += time.perf_counter() - start
        for name, total in totals.items():
            seconds[name].append(total)
    return seconds


def main() -> None:
    """Writes, checks and measures the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    layout = hf_bert.read_layout(json.loads((arguments.checkpoint / "config.json").read_text()))
    encoder = layout.load(hf_bert.plain_names(read_weights(arguments.checkpoint).tensors))
    work = workloads(encoder.config.vocab_size, encoder.config.max_sequence_tokens)
    sessions = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            path = Path(folder) / f"{name}.onnx"
            write_variant(name, encoder, path)
            sessions[name] = open_session(path, arguments.threads)
    first = arguments.only[0]
    for name, session in sessions.items():
        print(f"{name:18} differs from {first} by {largest_difference(session, sessions[first], work['mixed']):.1e}")
    for workload, feeds in work.items():
        tokens = sum(int(feed[graph.ATTENTION_MASK].sum()) for feed in feeds)
        padded = sum(feed[graph.ATTENTION_MASK].size for feed in feeds)
        print(f"\n{workload}: {len(feeds)} batches, {tokens} tokens, {100 * (1 - tokens / padded):.1f} % padding")
        seconds = measure(sessions, feeds, arguments.rounds)
        for name, times in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(times, seconds[first], strict=True))
            print(f"  {name:18} {1e3 * statistics.median(times):8.1f} ms  ({ratio:.3f})", flush=True)


if __name__ == "__main__":
    main()
