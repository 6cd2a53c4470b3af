"""Converts an error to a gRPC status: the code, the trailers and the details."""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from encserve_server.failures import Failure

ERROR_DOMAIN = "encserve"
REASON_TRAILER = "encserve-error-reason"
# The retry policy of gRPC clients obeys this trailer; it does not read RetryInfo.
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
DETAILS_TRAILER = "grpc-status-details-bin"
_CODES = {code.name: code for code in grpc.StatusCode}


def code_of(failure: Failure) -> grpc.StatusCode:
    """Return the status code of an error."""
    return _CODES[failure.status.grpc]


def details_of(failure: Failure) -> list[any_pb2.Any]:
    """Return the google.rpc messages that describe an error to programs."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=failure.reason, domain=ERROR_DOMAIN)]
    if failure.is_request_error:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.problem)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if failure.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(failure.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return list(map(_pack, details))


def trailers_of(failure: Failure) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of the status."""
    status = status_pb2.Status(code=code_of(failure).value[0], message=failure.text, details=details_of(failure))
    trailers: list[tuple[str, str | bytes]] = [
        (REASON_TRAILER, failure.reason),
        (DETAILS_TRAILER, status.SerializeToString()),
    ]
    if failure.retry_delay_s is not None:
        trailers.append((PUSHBACK_TRAILER, str(round(failure.retry_delay_s * 1000))))
    return tuple(trailers)


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def code_label(code: grpc.StatusCode) -> str:
    """Return the Go name of a status code, which dashboards expect: "OK", "InvalidArgument", "Canceled"."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))
