"""This project's own encoder: its configuration, its PyTorch module, and the checkpoint layouts that it can load."""
