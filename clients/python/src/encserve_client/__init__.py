"""A client library for encserve servers. Results are NumPy arrays.

    from encserve_client import EncoderClient

    with EncoderClient("localhost:50051") as client:
        vectors = client.embed(["a text", "another"])       # (2, d_model)
        rows = client.token_vectors(["a text", "another"])  # a (seq_len, d_model) array for each

`AsyncEncoderClient` has the same methods for asyncio.
"""

import os

# By default, gRPC prints each failed connection on stderr. The client's errors name the cause.
# GRPC_VERBOSITY=INFO shows gRPC's messages.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from encserve import __version__ as __version__
from encserve_client._base import PlaintextKeyWarning
from encserve_client.async_client import AsyncEncoderClient
from encserve_client.client import EncoderClient
from encserve_client.exceptions import (
    AccessDeniedError,
    CallCancelledError,
    ClientClosedError,
    DeadlineError,
    EncserveError,
    FingerprintError,
    InferenceError,
    InspectUnavailableError,
    InvalidInputError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    ProtocolError,
    RateLimitedError,
    ServerError,
    ServerUnavailableError,
    SpaceError,
    UnauthenticatedError,
)
from encserve_client.inputs import Input, TokenEmbeddings, TokenIds
from encserve_client.options import (
    Activation,
    Array,
    DType,
    Kind,
    Output,
    OutputKind,
    Pooling,
    Priority,
    Progress,
    Task,
)
from encserve_client.results import (
    Block,
    Classification,
    EncodedOutput,
    EncodeResult,
    InspectResult,
    ModelInfo,
    SequenceInfo,
    SparseVector,
    TaskInfo,
    Timings,
)
from encserve_client.retry import Outage, RetryPolicy
from encserve_client.scoring import maxsim, rank
from encserve_client.spans import sentence_spans, token_spans
from encserve_client.tls import Tls

__all__ = [
    "AccessDeniedError",
    "Activation",
    "Array",
    "AsyncEncoderClient",
    "Block",
    "CallCancelledError",
    "Classification",
    "ClientClosedError",
    "DType",
    "DeadlineError",
    "EncodeResult",
    "EncodedOutput",
    "EncoderClient",
    "EncserveError",
    "FingerprintError",
    "InferenceError",
    "Input",
    "InspectResult",
    "InspectUnavailableError",
    "InvalidInputError",
    "InvalidRequestError",
    "Kind",
    "MessageTooLargeError",
    "ModelInfo",
    "ModelNotFoundError",
    "Outage",
    "Output",
    "OutputKind",
    "OverloadedError",
    "PermissionDeniedError",
    "PlaintextKeyWarning",
    "Pooling",
    "Priority",
    "Progress",
    "ProtocolError",
    "RateLimitedError",
    "RetryPolicy",
    "SequenceInfo",
    "ServerError",
    "ServerUnavailableError",
    "SpaceError",
    "SparseVector",
    "Task",
    "TaskInfo",
    "Timings",
    "Tls",
    "TokenEmbeddings",
    "TokenIds",
    "UnauthenticatedError",
    "maxsim",
    "rank",
    "sentence_spans",
    "token_spans",
]
