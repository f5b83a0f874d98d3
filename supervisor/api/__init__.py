"""The Python API: `LLM`, the client that takes a frontend's place, and what goes in and comes out."""
