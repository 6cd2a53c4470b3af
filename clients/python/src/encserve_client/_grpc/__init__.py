"""gRPC: channels, metadata, and the `Wire` for threads and for asyncio."""
