"""Converts an error to the code and the trailers of a gRPC call."""

import grpc

from encserve_server.endpoints.status import status_of
from encserve_server.failures import Failure

REASON_TRAILER = "encserve-error-reason"
# gRPC clients with a retry policy use this trailer. They do not read RetryInfo.
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
DETAILS_TRAILER = "grpc-status-details-bin"
_CODES = {code.name: code for code in grpc.StatusCode}


def code_of(failure: Failure) -> grpc.StatusCode:
    """Return the status code of an error."""
    return _CODES[failure.status.grpc]


def trailers_of(failure: Failure) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of an error."""
    trailers: list[tuple[str, str | bytes]] = [
        (REASON_TRAILER, failure.reason),
        (DETAILS_TRAILER, status_of(failure).SerializeToString()),
    ]
    if failure.retry_delay_s is not None:
        trailers.append((PUSHBACK_TRAILER, str(round(failure.retry_delay_s * 1000))))
    return tuple(trailers)


def code_label(code: grpc.StatusCode) -> str:
    """Return the Go name of a status code, such as "OK" or "InvalidArgument". Dashboards expect these names."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))
