"""Images of prompts in a worker: their tensors are read, encoded and kept by digest (rows/extras/media_rows.py asks for them)."""
