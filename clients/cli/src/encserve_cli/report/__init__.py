"""A page about what a model did with one input: `_page.build_page`.

`_page` and `_figures` need plotly, the extra `report`. The numbers and names need NumPy alone, so nothing is imported
here.
"""
