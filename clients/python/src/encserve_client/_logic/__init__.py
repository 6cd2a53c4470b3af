"""What a client decides, without I/O: messages, retries, answers, streams. gRPC is behind `wire.Wire`."""
