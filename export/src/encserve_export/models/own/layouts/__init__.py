"""Checkpoint layouts: how somebody else's names and settings map onto the Encoder, one module per layout.

A module here that holds a `LAYOUT` is one that `encserve-export checkpoint` knows: to add a layout is to add a file.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from encserve_export.models.own.layouts.base import Layout
from encserve_export.models.own.layouts.stack import StackLayout

__all__ = ["Layout", "StackLayout", "known_layouts"]


@functools.cache
def known_layouts() -> Mapping[str, StackLayout]:
    """The layouts of bare checkpoints, by name."""
    found = (
        getattr(importlib.import_module(f"{__name__}.{module.name}"), "LAYOUT", None)
        for module in pkgutil.iter_modules(__path__)
    )
    return {layout.name: layout for layout in found if isinstance(layout, StackLayout)}
