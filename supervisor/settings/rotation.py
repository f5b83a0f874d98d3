"""What the start says of a rotation whose angles hang on the context that is served. Called by resolve.py."""

from collections.abc import Iterator

from meshlm.protocol.model import ModelSpec


def notes(spec: ModelSpec, max_model_len: int) -> Iterator[str]:
    """LongRoPE has two sets of factors, and a server has one table of angles."""
    rope = spec.rope
    original = rope.original_max_position_embeddings or spec.max_position_embeddings
    if rope.rope_type == "longrope" and rope.short_factor != rope.long_factor and max_model_len > original:
        yield (
            f"longrope: with --max-model-len {max_model_len} all texts are turned by long_factor, short ones too; "
            f"--max-model-len {original} takes short_factor, which texts of up to {original} tokens were trained with"
        )
