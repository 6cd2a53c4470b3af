"""The kinds of models: they turn rows into one vector, vectors for MaxSim, or weights over the vocabulary."""
