"""One model's calls: the catalog, checks, tokenizing, pooling, inspecting. Knows no gRPC and no Prometheus."""
