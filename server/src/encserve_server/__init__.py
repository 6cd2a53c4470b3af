"""The encserve server: model bundles in, a gRPC service out.

Who owns what, and how a request flows, is in `app`; batching is pure and in `batching`.
"""

__version__ = "0.1.0"
