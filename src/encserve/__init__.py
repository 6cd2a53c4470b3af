"""The distribution encserve: its version, its commands, and the extras that they need."""

__version__ = "0.1.0"
