"""Requests that cost a server more than the caller, and similar ordinary requests."""

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
# One method of each protocol.
PATHS = {"unary": ENCODE, "stream": ENCODE_STREAM, "open-inference": MODEL_INFER, "http": HTTP}
# The size of the largest message, without the bytes around its one long field.
LONGEST_FIELD = 4 * 2**20 - 64
MEAN, TOKENS, MULTI_VECTOR, SPARSE = (
    pb.OUTPUT_KIND_MEAN,
    pb.OUTPUT_KIND_TOKENS,
    pb.OUTPUT_KIND_MULTI_VECTOR,
    pb.OUTPUT_KIND_SPARSE,
)


def encode(inputs: Iterable[Sequence[int]], outputs: Iterable[pb.OutputSpec] = ()) -> bytes:
    """Return a serialized EncodeRequest of token ids."""
    request = pb.EncodeRequest()
    for ids in inputs:
        request.inputs.add().token_ids.ids.extend(ids)
    request.options.outputs.extend(outputs)
    return serialized(request)


def encode_text(text: str) -> pb.EncodeRequest:
    """Return a serialized EncodeRequest of one text."""
    return pb.EncodeRequest(inputs=[pb.Input(text=text)])


def in_stream(request_id: str, request: bytes) -> bytes:
    """Return a serialized EncodeRequest as a message of a stream."""
    return serialized(pb.EncodeStreamRequest(request_id=request_id, request=pb.EncodeRequest.FromString(request)))


def infer(n_tokens: int, request_id: str = "") -> bytes:
    """Return an Open Inference request for the rows of `n_tokens` ids."""
    ids = np.ones((1, n_tokens), np.int64)
    return serialized(infer_request(model="", request_id=request_id, outputs=["last_hidden_state"], input_ids=ids))


def infer_text(text: str) -> bytes:
    """Return an Open Inference request for the rows of a text."""
    return serialized(infer_request(model="", outputs=["last_hidden_state"], text=text_tensor(text)))


def post(path: str, fields: object) -> bytes:
    """Return an HTTP request."""
    body = orjson.dumps(fields)
    return head(path, f"content-length: {len(body)}") + body


def head(path: str, field: str) -> bytes:
    """Return the head of an HTTP request."""
    return f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{field}\r\n\r\n".encode()


def serialized(message: Message) -> bytes:
    """Return the bytes of a message."""
    data: bytes = message.SerializeToString()
    return data


def wide_fields(n_tokens: int) -> dict[str, object]:
    """Return an HTTP request whose reply is a little larger than `n_tokens` rows of the wide model."""
    # A number takes about 20 bytes in JSON, and 4 in a row.
    return {"input": [[1]] * (n_tokens // 4), "pooling": "mean"}


def slow_senders(server: RealServer, protocol: str, count: int) -> Holder:
    """Return callers that send 4 MiB slowly."""
    return _holder(server, protocol, f"slow senders, {protocol}", count, (b" " * LONGEST_FIELD,), is_slow=True)


def non_readers(
    server: RealServer, protocol: str, count: int, calls: int = 1, *, n_tokens: int = WIDE_TOKENS
) -> Holder:
    """Return callers of the wide model that do not read the reply of 64 KiB a token."""
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
