"""The PyTorch models: this project's own encoder, encoders of transformers, and users' modules."""
