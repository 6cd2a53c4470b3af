"""The Open Inference Protocol v2 over gRPC and HTTP, with the methods of Triton's tools; see docs/open-inference.md."""
