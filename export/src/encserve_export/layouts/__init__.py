"""Checkpoint layouts: how somebody else's names and settings map onto the Encoder, one module per layout."""

from encserve_export.layouts.base import Layout

__all__ = ["Layout"]
