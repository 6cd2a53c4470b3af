"""What is made of rows: one vector, vectors for MaxSim, weights over the vocabulary."""
