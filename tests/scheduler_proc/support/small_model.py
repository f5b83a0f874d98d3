"""The shape of a model whose sums one can make by hand."""

from tiny_models import spec_of

SMALL = spec_of(
    architecture="x",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
)
