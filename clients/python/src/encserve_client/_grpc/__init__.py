"""gRPC: the channel, what calls send along, and the `Wire` for threads and for asyncio."""
