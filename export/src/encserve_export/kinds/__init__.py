"""Reads the directory of a model. The kind of the model decides which module reads the directory.

A dense model computes one vector per text with an encoder. A static model computes one vector per text from a table of
token vectors. A multi-vector model computes several vectors per text, for MaxSim. A sparse model computes weights over
the vocabulary. A model of the kind "scores", such as a cross-encoder, computes the logits of labels.
"""
