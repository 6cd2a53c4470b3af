"""What a handler may ask of its call that does not depend on the connection."""

from collections.abc import Iterable
from typing import Any

import grpc

from encserve_server.http2.headers import Metadata, write_metadata


class PlainContext(grpc.aio.ServicerContext[Any, Any]):
    """The status a call will end with, and that nothing is compressed or authenticated."""

    def __init__(self) -> None:
        """Begins with OK, and no trailers."""
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailers: Metadata = ()
        self._trailer_block = b""  # the same as they are sent

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What goes with the status.

        Raises:
            ValueError: It cannot be sent.
        """
        trailers = tuple(trailing_metadata)
        self._trailer_block = write_metadata(trailers)  # now, while somebody can still do something about it
        self._trailers = trailers

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]
        """What will go with the status."""
        return self._trailers

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status if the handler returns."""
        self._code = code

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def set_details(self, details: str) -> None:
        """The status' text."""
        self._details = details

    def details(self) -> str:
        """The status' text."""
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Nothing that is sent is compressed."""

    def disable_next_message_compression(self) -> None:
        """Nothing that is sent is compressed."""

    def peer_identities(self) -> Iterable[bytes] | None:
        """None: connections are not authenticated."""
        return None

    def peer_identity_key(self) -> str | None:
        """None: connections are not authenticated."""
        return None

    def auth_context(self) -> dict[str, Iterable[bytes]]:
        """Nothing: connections are not authenticated."""
        return {}
