"""The Open Inference Protocol v2 over gRPC and HTTP, and the methods of Triton's tools.

docs/reference/open-inference.md describes the protocol.
"""
