"""The work around each call of every protocol: access checks, memory budget, traces, counts and errors."""

from encserve_server.calls.call import OPEN_REQUEST_BYTES, Call, Calls
from encserve_server.calls.method import Access, Method
from encserve_server.calls.scoring import score

__all__ = ["OPEN_REQUEST_BYTES", "Access", "Call", "Calls", "Method", "score"]
