"""gRPC: the server, the service and its codec, errors to statuses, the guard around every RPC, health."""
