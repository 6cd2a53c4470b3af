"""The Open Inference Protocol v2 without its messages: the meaning of tensors and parameters, over gRPC and HTTP."""
