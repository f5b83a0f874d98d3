"""Speculative decoding: what guesses the tokens that follow, without a model of its own."""
