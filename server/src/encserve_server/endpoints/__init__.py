"""The contract between protocols and transports: HTTP routes, gRPC services, and the server's parts for protocols."""
