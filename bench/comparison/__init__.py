"""The parts of `bench/compare.py`: what is asked, who answers, in which order, and what is made of the figures."""
