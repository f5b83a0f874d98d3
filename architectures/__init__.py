"""Model families, without torch: files -> ModelSpec, names of weights, how ranks split them."""
