"""What a model family is, without torch: files -> ModelSpec, names of weights, how ranks split them."""
