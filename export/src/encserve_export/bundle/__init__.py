"""Writes the folder of a bundle, complete or not at all."""
