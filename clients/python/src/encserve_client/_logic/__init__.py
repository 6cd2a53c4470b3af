"""The logic of a client without I/O: messages, retries, answers, streams. All I/O goes through `wire.Wire`."""
