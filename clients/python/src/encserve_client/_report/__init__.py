"""A page about what a model did with one input: `build_page`. Needs plotly, the extra `report`."""

from encserve_client._report._page import build_page

__all__ = ["build_page"]
