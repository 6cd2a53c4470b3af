"""Serves an ONNX graph with Triton until standard input ends.

The program starts Triton through pytriton, and runs in Triton's virtual environment. A request is INT64 [1, seq]. A
reply is FP32 [1, seq, d_model]. Triton's dynamic batcher is on, and combines only requests of the same length.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnxruntime as ort
from lines import answer_lines, versions
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

MAX_BATCH = 64


def make_instance(options: argparse.Namespace) -> Callable[..., Any]:
    """Return a function that runs the model on ids (batch, seq). The session options are the same as encserve's."""
    session_options = ort.SessionOptions()
    session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session_options.intra_op_num_threads = options.threads // options.instances
    session_options.inter_op_num_threads = 1
    session_options.add_session_config_entry("session.force_spinning_stop", "1")
    session_options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(options.graph, session_options, providers=["CPUExecutionProvider"])
    ids_name, mask_name, *type_names = options.inputs

    def infer(ids: Any) -> dict[str, Any]:
        # ids: (batch, seq); all sequences of a batch have the same length
        feeds = {ids_name: ids, mask_name: np.ones_like(ids), **{name: np.zeros_like(ids) for name in type_names}}
        (rows,) = session.run([options.output], feeds)
        return {"rows": rows}  # (batch, seq, d_model)

    wrapped: Callable[..., Any] = batch(infer)
    return wrapped


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", required=True)
    parser.add_argument(
        "--inputs",
        nargs="+",
        required=True,
        help="the names of the inputs: ids, mask, and token types if the graph has them",
    )
    parser.add_argument("--output", required=True)
    parser.add_argument("--d-model", type=int, required=True)
    parser.add_argument("--ports", type=int, nargs=3, required=True, metavar=("GRPC", "HTTP", "METRICS"))
    parser.add_argument("--threads", type=int, required=True, help="the total number of CPU threads of all instances")
    parser.add_argument("--instances", type=int, required=True)
    options = parser.parse_args()
    grpc_port, http_port, metrics_port = options.ports
    here = "127.0.0.1"
    config = TritonConfig(
        grpc_address=here,
        grpc_port=grpc_port,
        http_address=here,
        http_port=http_port,
        metrics_address=here,
        metrics_port=metrics_port,
    )

    with ExitStack() as stack:

        def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
            triton = stack.enter_context(Triton(config=config))
            triton.bind(
                model_name="encoder",
                infer_func=[make_instance(options) for _ in range(options.instances)],
                inputs=[Tensor(name="ids", dtype=np.int64, shape=(-1,))],
                outputs=[Tensor(name="rows", dtype=np.float32, shape=(-1, options.d_model))],
                config=ModelConfig(batching=True, max_batch_size=MAX_BATCH, batcher=DynamicBatcher()),
            )
            triton.run()
            return versions("nvidia-pytriton", "onnxruntime", "numpy"), {}

        answer_lines(prepare)


if __name__ == "__main__":
    main()
