"""The media process: images of clients become tensors in shared memory, and the tokens that stand for them. io.py begins."""
