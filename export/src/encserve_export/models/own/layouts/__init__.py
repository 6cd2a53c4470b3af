"""The layouts that `encserve-export checkpoint` recognises, one module per layout.

A layout is the naming scheme of one family of hand-written checkpoints. `known_layouts` imports every module of this
package and collects the modules' `LAYOUT` constants. To add a layout, add a module.
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
