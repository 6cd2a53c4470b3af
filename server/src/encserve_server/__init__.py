"""The encserve server: model bundles in, a gRPC service out; `app` says what it is built of."""

__version__ = "0.1.0"
