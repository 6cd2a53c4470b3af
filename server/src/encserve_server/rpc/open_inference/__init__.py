"""The Open Inference Protocol v2, and what Triton's tools ask for besides: docs/open-inference.md."""
