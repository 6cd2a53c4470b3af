"""Converts an error to the code and the trailers of a gRPC call."""

import json
from urllib.parse import quote

import grpc

from encserve_server.endpoints.status import status_of
from encserve_server.failures import Failure

REASON_TRAILER = "encserve-error-reason"
# gRPC clients with a retry policy use this trailer. They do not read RetryInfo.
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
DETAILS_TRAILER = "grpc-status-details-bin"
# The value is JSON, because a transport knows no messages of a protocol, and clients need no package of google.rpc.
REFUSED_INPUTS_TRAILER = "encserve-refused-inputs"
# By default, gRPC clients accept trailers of 8 KiB. The rest is for names, gRPC's own trailers and a proxy's.
_MOST_TRAILER_BYTES = 7 * 1024
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
    if failure.refused:
        # gRPC sends the text percent-encoded, and binary trailers in base64.
        used = len(quote(failure.text)) + sum(len(value) * 4 // 3 for _, value in trailers)
        trailers.append((REFUSED_INPUTS_TRAILER, _refused_inputs(failure, _MOST_TRAILER_BYTES - used)))
    return tuple(trailers)


def _refused_inputs(failure: Failure, most_bytes: int) -> str:
    """Return a JSON array with as many refused inputs as fit."""
    fitting: list[str] = []
    size = 2
    for text, reason in failure.refused:
        fitting.append(json.dumps({"message": text, "reason": reason}, separators=(",", ":")))
        size += len(fitting[-1]) + 1
        if size > most_bytes:
            del fitting[-1]
            break
    return f"[{','.join(fitting)}]"


def code_label(code: grpc.StatusCode) -> str:
    """Return the Go name of a status code, such as "OK" or "InvalidArgument". Dashboards expect these names."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))
