"""The Open Inference Protocol v2 over gRPC, and the RPCs that Triton's tools need: docs/open-inference.md."""
