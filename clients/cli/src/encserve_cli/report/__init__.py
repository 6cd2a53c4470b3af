"""A page about what a model did with one input: `page.build_page`.

`page` and `figures` import plotly, which takes a second; the numbers and names need NumPy alone. So nothing is imported
here.
"""
