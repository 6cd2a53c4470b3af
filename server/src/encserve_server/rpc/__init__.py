"""gRPC: the server, its services, their protobuf codecs, error statuses, health, and limits for every RPC."""
