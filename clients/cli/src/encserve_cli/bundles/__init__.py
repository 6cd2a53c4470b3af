"""Finds the bundle of a model, or makes the bundle: for `serve`, `pull`, and the option --bundle of other commands.

A bundle is looked for in the user's cache. If the cache does not have the bundle, the checkpoint is downloaded from the
hub and exported, or the bundle is copied from its URI. A bundle in the cache needs no network and no PyTorch.
"""
