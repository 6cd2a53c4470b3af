"""The folder that a server reads: written complete or not at all, and read back."""
