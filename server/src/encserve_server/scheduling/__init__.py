"""Admission, the queue, batches and the threads that run them. Knows no gRPC, no protobuf, no Prometheus."""
