"""Writes requests for Triton down, serialised, and asks for a few of them. Runs in Triton's environment.

The benchmark's own callers send the requests later, so that encserve and Triton are asked by the same program.
"""

import argparse
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from lines import answer_lines, versions
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc.service_pb2 import ModelInferRequest


def serialise(sequence: list[int]) -> str:
    """One sequence as a request; base64 of the message."""
    request = ModelInferRequest(model_name="encoder")
    tensor = request.inputs.add(name="ids", datatype="INT64")
    tensor.shape.extend([1, len(sequence)])
    request.outputs.add(name="rows")
    request.raw_input_contents.append(np.array(sequence, np.int64).tobytes())
    return base64.b64encode(request.SerializeToString()).decode()


def main() -> None:
    """Answers one question: the requests, and the rows of the first sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    options = parser.parse_args()

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        sequences = json.loads(options.workload.read_text())["ids"]

        def check(places: list[int], file: str) -> dict[str, Any]:
            client = InferenceServerClient(options.target)
            found = []
            for place in places:
                ids = np.array([sequences[place]], np.int64)  # (1, seq)
                tensor = InferInput("ids", ids.shape, "INT64")
                tensor.set_data_from_numpy(ids)
                found.append(client.infer("encoder", [tensor]).as_numpy("rows")[0])  # (seq, d_model)
            client.close()
            np.savez(file, *found)
            return {}

        handlers = {"requests": lambda: {"requests": [serialise(it) for it in sequences]}, "check": check}
        return versions("tritonclient"), handlers

    answer_lines(prepare)


if __name__ == "__main__":
    main()
