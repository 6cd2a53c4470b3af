"""The encoders: our own, transformers' encoders, and callers' modules."""
