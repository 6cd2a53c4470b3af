"""The messages of Triton's gRPC service, which are those of the Open Inference Protocol v2 and a few more.

The .proto files are those of https://github.com/triton-inference-server/common at 83adf7c, under LICENSE; the stubs are
generated. They are of this package alone: a process that has tritonclient's too has every message twice.
"""
