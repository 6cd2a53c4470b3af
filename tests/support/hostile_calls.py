"""Requests that are cheap for the caller but expensive for the server, and ordinary requests for comparison."""

from collections.abc import Iterable, Sequence

import numpy as np
import orjson
from google.protobuf.message import Message
from hostile_attacks import ENCODE, ENCODE_STREAM, MODEL_INFER, Holder
from hostile_models import WIDE_TOKENS
from open_inference import infer_request, text_tensor
from real_server import RealServer

from encserve_proto.v1 import encoder_pb2 as pb

HTTP = "/v1/embeddings"
# One method or route for each protocol.
PATHS = {"unary": ENCODE, "stream": ENCODE_STREAM, "open-inference": MODEL_INFER, "http": HTTP}
# The largest gRPC message has 4 MiB. The longest field leaves 64 bytes for the rest of the message.
LONGEST_FIELD = 4 * 2**20 - 64
MEAN, TOKENS, MULTI_VECTOR, SPARSE = (
    pb.OUTPUT_KIND_MEAN,
    pb.OUTPUT_KIND_TOKENS,
    pb.OUTPUT_KIND_MULTI_VECTOR,
    pb.OUTPUT_KIND_SPARSE,
)


def encode(inputs: Iterable[Sequence[int]], outputs: Iterable[pb.OutputSpec] = ()) -> bytes:
    """Return a serialized EncodeRequest with token ids."""
    request = pb.EncodeRequest()
    for ids in inputs:
        request.inputs.add().token_ids.ids.extend(ids)
    request.options.outputs.extend(outputs)
    return serialized(request)


def encode_text(text: str) -> pb.EncodeRequest:
    """Return an EncodeRequest with one text."""
    return pb.EncodeRequest(inputs=[pb.Input(text=text)])


def in_stream(request_id: str, request: bytes) -> bytes:
    """Return a serialized message for EncodeStream that contains a serialized EncodeRequest."""
    return serialized(pb.EncodeStreamRequest(request_id=request_id, request=pb.EncodeRequest.FromString(request)))


def infer(n_tokens: int, request_id: str = "") -> bytes:
    """Return a serialized Open Inference request for the hidden states of `n_tokens` tokens."""
    ids = np.ones((1, n_tokens), np.int64)
    return serialized(infer_request(model="", request_id=request_id, outputs=["last_hidden_state"], input_ids=ids))


def infer_text(text: str) -> bytes:
    """Return a serialized Open Inference request for the hidden states of a text."""
    return serialized(infer_request(model="", outputs=["last_hidden_state"], text=text_tensor(text)))


def post(path: str, fields: object, *headers: str) -> bytes:
    """Return an HTTP POST request with a JSON body."""
    body = orjson.dumps(fields)
    return head(path, f"content-length: {len(body)}", *headers) + body


def head(path: str, *fields: str) -> bytes:
    """Return the head of an HTTP POST request with additional headers."""
    lines = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", *fields]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def serialized(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def wide_fields(n_tokens: int) -> dict[str, object]:
    """Return the fields of an HTTP request to the wide model, which has very long vectors.

    The reply is a little larger than the hidden states of `n_tokens` tokens in float32.
    """
    # A number has about 20 bytes in JSON, but 4 bytes in float32. So a quarter of the numbers in JSON takes 1.25 times
    # the bytes of all numbers in float32.
    return {"input": [[1]] * (n_tokens // 4), "pooling": "mean"}


def slow_senders(server: RealServer, protocol: str, count: int) -> Holder:
    """Return a group of callers that send almost 4 MiB each. They send the last 64 KiB very slowly."""
    return _holder(server, protocol, f"slow senders, {protocol}", count, (b" " * LONGEST_FIELD,), is_slow=True)


def non_readers(
    server: RealServer, protocol: str, count: int, calls: int = 1, *, n_tokens: int = WIDE_TOKENS
) -> Holder:
    """Return a group of callers that do not read the replies of the wide model.

    A gRPC reply has 64 KiB for each token.
    """
    wide = encode([[1] * n_tokens])
    message = {
        "unary": wide,
        "stream": in_stream("a", wide),
        "open-inference": infer(n_tokens),
        "http": orjson.dumps(wide_fields(n_tokens)),
    }[protocol]
    return _holder(server, protocol, f"non-readers, {protocol}", count, (message,) * calls, is_slow=False)


def _holder(
    server: RealServer, protocol: str, name: str, count: int, messages: tuple[bytes, ...], *, is_slow: bool
) -> Holder:
    is_grpc = protocol != "http"
    port = server.grpc_port if is_grpc else server.http_port
    assert port is not None
    return Holder(name, count, port, PATHS[protocol], messages, is_grpc, is_slow)
