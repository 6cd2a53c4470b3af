"""A DNS server on a free loopback port. A test may change the IPv4 addresses in the server's answers."""

import ipaddress
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_RESPONSE, _NO_ERROR = 0x8580, 0  # header flags: a response, authoritative, recursion available
_TYPE_A, _CLASS_IN = 1, 1


class DnsServer:
    """Answers each question for A records with one record for each address. Answers to other questions have no records.

    Attributes:
        addresses: The addresses for the next answers.
        port: The UDP port on 127.0.0.1.
    """

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(timeout=10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, caller = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(self._answer(query), caller)

    def _answer(self, query: bytes) -> bytes:
        """Return the answer in the format of RFC 1035, section 4: a header, the question, and the records."""
        end = query.index(b"\0", 12) + 1  # the position after the question's name
        (kind,) = struct.unpack_from(">H", query, end)
        found = self.addresses if kind == _TYPE_A else ()
        header = query[:2] + struct.pack(">HHHHH", _RESPONSE | _NO_ERROR, 1, len(found), 0, 0)
        records = [
            # Each record: a pointer to the question's name, the time to live (0), and an address of four bytes.
            struct.pack(">HHHIH", 0xC00C, _TYPE_A, _CLASS_IN, 0, 4) + ipaddress.IPv4Address(address).packed
            for address in found
        ]
        return header + query[12 : end + 4] + b"".join(records)
