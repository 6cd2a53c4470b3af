"""The mechanics of gRPC and HTTP: sockets, connections, and limits. Transports know no protocol."""
