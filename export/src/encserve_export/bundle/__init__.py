"""Writes a bundle, the directory of an exported model. A failed export leaves no incomplete bundle."""
