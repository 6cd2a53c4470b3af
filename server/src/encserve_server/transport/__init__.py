"""The mechanics of gRPC and HTTP: sockets, connections, and limits. Transports do not depend on protocols."""
