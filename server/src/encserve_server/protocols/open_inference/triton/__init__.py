"""The messages of Triton's gRPC service: the Open Inference Protocol v2 and a few more.

The .proto files come from https://github.com/triton-inference-server/common at 83adf7c, under LICENSE. The stubs are
generated from them. A process that also imports tritonclient has two classes for each message.
"""
