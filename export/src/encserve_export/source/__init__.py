"""Where a model comes from: files, the hub, weights, tokenizers. Nothing in them is ever executed."""
