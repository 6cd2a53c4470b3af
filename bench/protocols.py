"""Measures what each protocol costs a call, and that the others cost callers of Encode nothing.

    python bench/protocols.py MODEL_REPOSITORY [--model NAME] [--rounds 20] [--seconds 2] [--tokens 10]

One server has every protocol on, another none but Encode. In each round both are asked by 64 callers of Encode, and the
first also by 16 callers of each protocol, a thread each, that want one pooled vector of the same token ids. What counts
there is the server's CPU time for a call, the model's included, so the model should be small. Bytes are of replies.
"""

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import grpc
import numpy as np
from harness.load import POOLED, served
from harness.machine import OtherWork
from harness.rounds import Measurement, Patience, Side, measure, ratios, spread
from harness.workload import random_workload, read_newest
from real_server import RealServer

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.rpc.open_inference.triton import grpc_service_pb2 as triton

CALLERS = 16
OFF, ON = "Encode, other protocols off", "Encode, other protocols on"
Ask = Callable[[], int]  # one call; the bytes of its reply


def grpc_asker(target: str, method: str, request: bytes) -> Ask:
    """Calls with bytes over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    call: Callable[..., bytes] = grpc.insecure_channel(target, options).unary_unary(method)
    return lambda: len(call(request, timeout=30))


def http_asker(port: int, path: str, body: object) -> Ask:
    """Posts over a connection that is kept."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    data, headers = json.dumps(body), {"Content-Type": "application/json"}

    def ask() -> int:
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"{path}: {response.status} {answer[:200]!r}")
        return len(answer)

    return ask


def protocols(server: RealServer, model: str, ids: Sequence[int]) -> dict[str, Callable[[], Ask]]:
    """What makes a caller of each."""
    http_port = next(line["http_port"] for line in server.log if line["message"] == "serving")
    encode = pb.EncodeRequest(
        model=model,
        inputs=[pb.Input(token_ids=pb.TokenIds(ids=ids))],
        options=pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)]),
    ).SerializeToString()
    tensor = triton.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[1, len(ids)])
    infer = triton.ModelInferRequest(
        model_name=model,
        inputs=[tensor],
        raw_input_contents=[np.array(ids, "<i8").tobytes()],
        outputs=[triton.ModelInferRequest.InferRequestedOutputTensor(name="embedding")],
    ).SerializeToString()
    openai = {"model": model, "input": list(ids), "add_special_tokens": False, "encoding_format": "base64"}
    target = server.target
    return {
        "Encode": lambda: grpc_asker(target, "/encserve.v1.EncoderService/Encode", encode),
        "ModelInfer": lambda: grpc_asker(target, "/inference.GRPCInferenceService/ModelInfer", infer),
        "/v1/embeddings, base64": lambda: http_asker(http_port, "/v1/embeddings", openai),
        "/v1/embeddings, float": lambda: http_asker(http_port, "/v1/embeddings", openai | {"encoding_format": "float"}),
        "/embed": lambda: http_asker(http_port, "/embed", {"inputs": [list(ids)]}),
    }


def load(server: RealServer, make: Callable[[], Ask], seconds: float, tokens: int) -> Measurement:
    """Callers that each wait for their answer, for some seconds."""
    ends_at = time.monotonic() + seconds
    counts = [0] * CALLERS
    errors: list[Exception] = []

    def call(place: int) -> None:
        ask = make()
        try:
            while time.monotonic() < ends_at:
                ask()
                counts[place] += 1
        except Exception as error:  # told by the thread that waits for all
            errors.append(error)

    threads = [threading.Thread(target=call, args=(place,)) for place in range(CALLERS)]
    cpu, began = server.metric("process_cpu_seconds_total"), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    cpu_ms = 1000 * (server.metric("process_cpu_seconds_total") - cpu) / sum(counts)
    return Measurement(sum(counts) * tokens, time.perf_counter() - began, server_cpu_ms=cpu_ms)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_repository", type=Path, help="a model repository")
    parser.add_argument("--model", help="NAME; the first one without it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2, help="how long each load lasts")
    parser.add_argument("--tokens", type=int, default=10, help="of a call")
    options = parser.parse_args(arguments)
    bundle = read_newest(options.model_repository, options.model)
    workload = random_workload([options.tokens] * 64, vocab_size=bundle.vocab_size, seed=0)
    own = ["--model", bundle.name, "--tune-batches"]
    with (
        served(options.model_repository, [*own, "--no-open-inference"], workload, options.seconds) as off,
        served(options.model_repository, [*own, "--http-port", "0"], workload, options.seconds) as on,
    ):
        encode = {name: next(it for it in its.sides() if it.name == POOLED) for name, its in ((OFF, off), (ON, on))}
        sides = [Side(name, name, side.run) for name, side in encode.items()]
        makers = protocols(on.server, bundle.name, workload.sequences[0].tolist())
        for name, make in makers.items():
            sides.append(Side(name, name, partial(load, on.server, make, options.seconds, options.tokens)))
        sizes = {name: make()() for name, make in makers.items()}
        found = measure(sides, options.rounds, 0, lambda *_: None, Patience(240, lambda: OtherWork().share))
    for name, its in found.items():
        calls = np.median([it.tokens_per_second for it in its]) / options.tokens
        cpu = np.median([it.server_cpu_ms or 0.0 for it in its])
        size = f", {sizes[name]:,} bytes" if name in sizes else ""
        print(f"{name}: {calls:,.0f} calls/s, {cpu:.3f} ms of the server's CPUs a call{size}")
    ratio = spread(ratios(found[ON], found[OFF]))
    print(f"calls/s of Encode with all protocols on : off {ratio.median:.3f} [{ratio.low:.3f}-{ratio.high:.3f}]")


if __name__ == "__main__":
    main()
