"""Encodes texts with sentence-transformers in this process.

The program runs in the virtual environment of sentence-transformers. One call of `encode` gets all texts, and sorts the
texts by length. Only this call is timed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lines import answer_lines, versions
from sentence_transformers import SentenceTransformer

OUTPUTS = {"tokens": "token_embeddings", "pooled": "sentence_embedding"}


def main() -> None:
    """Answer the commands "run" and "check" until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        torch.set_num_threads(options.threads)
        texts = json.loads(options.workload.read_text())["texts"]
        model = SentenceTransformer(options.checkpoint, device="cpu")

        def encode(chosen: list[str], output: str, batch_size: int) -> Any:
            return model.encode(
                chosen,
                output_value=OUTPUTS[output],
                batch_size=batch_size,
                show_progress_bar=False,
                normalize_embeddings=output == "pooled",
            )

        def run(output: str, batch_size: int, count: int) -> dict[str, Any]:
            began = time.perf_counter()
            encode(texts[:count], output, batch_size)
            return {"seconds": time.perf_counter() - began}

        def check(indices: list[int], file: str, output: str) -> dict[str, Any]:
            found = encode([texts[index] for index in indices], output, 32)
            np.savez(
                file, *(np.atleast_2d(np.asarray(array)) for array in found)
            )  # (seq, d_model) or (1, d_model) each
            return {}

        return versions("sentence-transformers", "torch", "transformers"), {"run": run, "check": check}

    answer_lines(prepare)


if __name__ == "__main__":
    main()
