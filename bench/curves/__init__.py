"""How cost grows: what `bench/scaling.py` measures, and the plots that are made of it."""
