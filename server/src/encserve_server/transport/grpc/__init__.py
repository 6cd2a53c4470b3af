"""gRPC: the server, the limits of every RPC, error statuses, health, and reflection."""
