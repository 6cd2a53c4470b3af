"""Reads the directory of a model, for each kind of model.

A model makes one vector per text, several vectors for MaxSim, or sparse weights over the vocabulary.
"""
