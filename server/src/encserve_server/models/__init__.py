"""The calls of a model: catalog, checks, tokenizing, pooling, inspecting. Uses no gRPC and no Prometheus."""
