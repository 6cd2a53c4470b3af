"""Compares what multi-vector and sparse models give with rows, and with sentence-transformers.

    python bench/retrieval.py CHECKPOINT [--rounds 6] [--seconds 4] [--sequences 600]

Two models are made of CHECKPOINT, a directory of BERT's kind in the layout of Hugging Face (as that of all-
MiniLM-L6-v2): its encoder with a random projection to 128 numbers and what ColBERT has behind it, and its encoder
with a random head over the vocabulary, biased so that some 200 words of a text have a weight. Both are exported and
served by one server, which 64 callers ask for documents, one text a call, in float16: for all rows of the last hidden
state, for the vectors of MaxSim, and for sparse weights. sentence-transformers makes the same in process, given all
texts at once, in the best size of batches of 8, 16, 32 and 64. All sides are given the same texts, of lengths that
real texts have; rounds are interleaved.
"""

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from harness.load import CALLERS, TIMEOUT_SECONDS, warmup_of
from harness.machine import OtherWork, describe_machine
from harness.rounds import Measurement, Patience, Side, measure, ratios, spread
from harness.sides import CEILING, ceiling_side, sweep_budgets
from harness.workload import Workload, choose_lengths, open_tokenizer, read_newest, text_workload
from real_server import RealServer, real_server

from encserve_cli.load import Request, closed_loop, make_text_calls
from encserve_client import EncoderClient
from encserve_export import Target, export_hf
from encserve_server.engine.onnx import OnnxEngine
from encserve_server.system.cpus import usable_cpus

TOKENS, MULTI_VECTOR, SPARSE = "tokens", "multi-vector", "sparse"
THEIR_MULTI_VECTOR, THEIR_SPARSE = "MultiVectorEncoder", "SparseEncoder"
WIDTH = 128
ACTIVE = 200
BATCH_SIZES = (8, 16, 32, 64)
PAIRS = (
    (MULTI_VECTOR, TOKENS),
    (MULTI_VECTOR, CEILING),
    (MULTI_VECTOR, THEIR_MULTI_VECTOR),
    (CEILING, THEIR_MULTI_VECTOR),
    (SPARSE, THEIR_SPARSE),
)


def make_multi_vector(checkpoint: Path, folder: Path) -> Any:
    """Writes a MultiVectorEncoder, and gives it."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    encoder = Transformer(str(checkpoint))
    torch.manual_seed(0)
    projection = Dense(
        encoder.get_embedding_dimension(),
        WIDTH,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [encoder, projection, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    model = MultiVectorEncoder(modules=modules, device="cpu")
    model.save_pretrained(str(folder))
    return model


def make_sparse(checkpoint: Path, folder: Path, text: str) -> Any:
    """Writes a SparseEncoder (SPLADE, max) that has some `ACTIVE` weights for a text, and gives it."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    encoder = AutoModel.from_pretrained(str(checkpoint))
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(encoder.config).eval()
    model.base_model.load_state_dict(encoder.state_dict(), strict=False)
    with torch.inference_mode():
        largest = model(**tokenizer(text, return_tensors="pt")).logits[0].amax(0)
    with torch.no_grad():
        model.get_output_embeddings().bias -= largest.sort(descending=True).values[ACTIVE]
    encoder_folder = folder.with_name(f"{folder.name}-encoder")
    model.save_pretrained(encoder_folder)
    tokenizer.save_pretrained(encoder_folder)
    modules = [Transformer(str(encoder_folder), transformer_task="fill-mask"), SpladePooling("max")]
    made = SparseEncoder(modules=modules, device="cpu")
    made.save_pretrained(str(folder))
    return made


def our_side(server: RealServer, name: str, workload: Workload, request: Request, seconds: float) -> Side:
    """64 callers who want one kind of output of one model."""
    with EncoderClient(server.target) as client:
        calls = make_text_calls(workload.texts, client.model(request.model), request)
    calls = [dataclasses.replace(it, tokens=length) for it, length in zip(calls, workload.lengths, strict=True)]

    def run() -> Measurement:
        result = closed_loop(
            server.target,
            calls,
            concurrency=CALLERS,
            seconds=seconds,
            warmup_seconds=warmup_of(seconds),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        if result.errors:
            raise RuntimeError(f"{name}: {result.errors} {result.error_examples}")
        return Measurement(result.tokens, result.seconds)

    return Side(name, f"encserve, {name}, {CALLERS} callers", run)


def their_side(name: str, encode: Callable[..., Any], workload: Workload) -> Side:
    """sentence-transformers, in the best size of batches, which is found first."""

    def run(size: int) -> Measurement:
        began = time.perf_counter()
        encode(workload.texts, batch_size=size, show_progress_bar=False)
        return Measurement(workload.tokens, time.perf_counter() - began)

    run(BATCH_SIZES[-1])
    found = {size: max(run(size).tokens_per_second for _ in range(2)) for size in BATCH_SIZES}
    best = max(found, key=lambda size: found[size])
    return Side(name, f"{name}.encode_document, batches of {best}", lambda: run(best))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a directory of BERT's kind, with tokenizer.json")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4, help="how long each load of the server lasts")
    parser.add_argument("--sequences", type=int, default=600)
    options = parser.parse_args(arguments)
    lengths = choose_lengths(options.sequences, seed=0, longest=256)
    workload = text_workload(lengths, open_tokenizer(options.checkpoint / "tokenizer.json"), seed=0)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cpus']} CPUs; {len(lengths)} texts, {workload.tokens:,} tokens")
    with tempfile.TemporaryDirectory() as folder:
        their = {
            MULTI_VECTOR: make_multi_vector(options.checkpoint, Path(folder, MULTI_VECTOR)),
            SPARSE: make_sparse(options.checkpoint, Path(folder, SPARSE), workload.texts[0]),
        }
        models = Path(folder, "models")
        for name in their:
            export_hf(Path(folder, name), Target(model_repository=models, name=name))
        graph = read_newest(models, MULTI_VECTOR).graph
        engine = OnnxEngine(graph, device="cpu", intra_op_threads=usable_cpus())
        budgets = sweep_budgets(engine, workload, 0)
        with contextlib.closing(engine), real_server(models, "--tune-batches") as server:
            requests = {
                TOKENS: Request(dtype="float16", model=MULTI_VECTOR),
                MULTI_VECTOR: Request(dtype="float16", model=MULTI_VECTOR, kind="multi_vector"),
                SPARSE: Request(dtype="float16", model=SPARSE, kind="sparse"),
            }
            sides = [our_side(server, name, workload, it, options.seconds) for name, it in requests.items()]
            sides += [
                ceiling_side(engine, workload, max(budgets, key=lambda it: budgets[it])),
                their_side(THEIR_MULTI_VECTOR, their[MULTI_VECTOR].encode_document, workload),
                their_side(THEIR_SPARSE, their[SPARSE].encode_document, workload),
            ]
            found = measure(sides, options.rounds, 0, lambda *_: None, Patience(240, lambda: OtherWork().share))
    for side in sides:
        print(f"{side.label}: {np.median([it.tokens_per_second for it in found[side.name]]):,.0f} tokens/s")
    for mine, base in PAIRS:
        its = spread(ratios(found[mine], found[base]))
        print(f"{mine} : {base} {its.median:.2f} [{its.low:.2f}-{its.high:.2f}]")


if __name__ == "__main__":
    main()
