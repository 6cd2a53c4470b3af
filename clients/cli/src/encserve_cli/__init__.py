"""The command `encserve`: asks a server, looks into models, and measures."""

__version__ = "0.1.0"
