"""The Open Inference Protocol v2 without its messages: what tensors and parameters mean, over gRPC and HTTP."""
