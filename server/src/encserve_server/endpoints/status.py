"""Converts an error to google.rpc messages: a status, and the details for programs."""

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from encserve_server.failures import Failure

ERROR_DOMAIN = "encserve"


def status_of(failure: Failure) -> status_pb2.Status:
    """Return the status of an error, with its details: the reason, the wrong field, and the time until a retry."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=failure.reason, domain=ERROR_DOMAIN)]
    if failure.is_request_error:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.problem)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if failure.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(failure.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = code_pb2.Code.Value(failure.status.grpc)
    return status_pb2.Status(code=code, message=failure.text, details=list(map(_pack, details)))


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
