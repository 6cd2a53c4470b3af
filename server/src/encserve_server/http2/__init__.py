"""A gRPC server over HTTP/2 on one asyncio loop, with the interface of `grpc.aio.Server`.

What each module owns:

    server.py      the interface: handlers, listening sockets, start, drain, stop
    connection.py  one connection: its calls, its frames out, its end
    intake.py      one connection's frames in, and what they may not be
    calls.py       one call: handler, deadline, status, and what the handler sees of it
    context.py     the part of that which does not depend on the connection
    outgoing.py    what is to be sent, as windows allow it (pure)
    incoming.py    a call's messages as they arrive (pure)
    headers.py     header blocks: HPACK in and out, gRPC's names and values (pure)
    frames.py      bytes to frames and back (pure)

    socket ──▶ FrameReader ──▶ Intake ──▶ Call ──▶ Incoming ──▶ handler
    socket ◀── Connection ◀── Outgoing ◀── Call ◀──────────────────┘

RFC 9113 (HTTP/2), RFC 7541 (HPACK) and gRPC's PROTOCOL-HTTP2.md. Everything happens on the event loop's thread.
"""
