"""The gates: rows against PyTorch, texts against the libraries of the authors."""
