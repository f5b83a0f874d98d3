"""Models that the transformers library computes, with our attention, KV cache and scheduler (--model-impl transformers)."""
