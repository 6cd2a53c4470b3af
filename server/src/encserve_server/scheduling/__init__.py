"""Admission, the queue, batches and the threads that run batches. Uses no gRPC, no protobuf, no Prometheus."""
