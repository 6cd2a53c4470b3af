"""The caller's trace goes along with every call, where the caller has one."""

import sys

from encserve_client._wire_sync import Metadata


def with_trace(metadata: Metadata) -> Metadata:
    """A call's metadata and with it the current span's context, as OpenTelemetry's propagators write it.

    That is W3C Trace Context, in the headers traceparent and tracestate, unless the process has chosen others. A header
    that `metadata` has already stays as it is.

    A span can be current only if somebody has imported OpenTelemetry: so this does not, and where nobody has, it costs
    nothing and nothing is added.
    """
    if sys.modules.get("opentelemetry.trace") is None:
        return metadata
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    given = {key for key, _ in metadata}
    headers = ((key.lower(), value) for key, value in carrier.items())
    return (*metadata, *((key, value) for key, value in headers if key not in given))
