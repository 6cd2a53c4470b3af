"""Admission, the queue, batches, and the threads that run batches. It does not use gRPC, protobuf or Prometheus."""
