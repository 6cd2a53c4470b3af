"""Defines this project's own encoder: the configuration, the PyTorch module, and the known checkpoint layouts."""
