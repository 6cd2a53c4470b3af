"""The contract between protocols and transports: HTTP routes, gRPC services, and the parts of the server they use."""
