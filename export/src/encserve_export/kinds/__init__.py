"""Reads models of each kind: one vector per text, vectors for MaxSim, or sparse weights over the vocabulary."""
