"""A gRPC server over HTTP/2 on one asyncio loop, with the interface of `grpc.aio.Server`.

What each module owns:

    server.py      the interface: handlers, listening sockets, start, drain, stop
    connection.py  one connection: its frames in, its limits, its end
    calls.py       one call: handler, deadline, status
    context.py     what a handler sees of its call
    outgoing.py    what is to be sent, as windows allow it (pure)
    incoming.py    a call's messages as they arrive (pure)
    headers.py     header blocks: HPACK in and out, gRPC's names and values (pure)
    frames.py      bytes to frames and back (pure)

    socket ──▶ FrameReader ──▶ Connection ──▶ Incoming ──▶ Call ──▶ handler
    socket ◀────────────────── Connection ◀── Outgoing ◀── Call ◀──────┘

RFC 9113 (HTTP/2), RFC 7541 (HPACK) and gRPC's PROTOCOL-HTTP2.md. Everything happens on the event loop's thread.
"""
