"""MeshLM: an LLM serving engine built as a mesh of small processes."""

__version__ = "0.1.0"
