"""Fixtures of the command's tests: a fake encoder service on a real grpc.aio server."""

from fake_encoder import service

__all__ = ["service"]
