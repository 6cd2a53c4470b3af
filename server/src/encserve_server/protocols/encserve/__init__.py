"""encserve.v1: our own protocol, over gRPC."""
