"""The layouts of state dicts that `encserve-export checkpoint` knows, one module per layout.

Every module here with a `LAYOUT` is found: to add a layout, add a file.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from encserve_export.models.own.layouts.stack import StackLayout

__all__ = ["StackLayout", "known_layouts"]


@functools.cache
def known_layouts() -> Mapping[str, StackLayout]:
    """Return the layouts by name."""
    found = (
        getattr(importlib.import_module(f"{__name__}.{module.name}"), "LAYOUT", None)
        for module in pkgutil.iter_modules(__path__)
    )
    return {layout.name: layout for layout in found if isinstance(layout, StackLayout)}
