"""Ollama's API for the model of this mesh (--api ollama)."""
