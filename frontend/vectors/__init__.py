"""Embeddings, scores and classes: what a server with `--runner pooling` answers."""
