"""What a start says of settings that mean something else than one may think. Called by resolve.py."""

from collections.abc import Iterator

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec


def of_halves(config: MeshConfig, max_num_seqs: int, max_num_batched_tokens: int) -> list[str]:
    """That --enable-dbo halves no step: a step of decodes has a token for each request, one with prompts up to its budget."""
    settings = config.experts
    decode, prefill = (
        settings.dbo_decode_token_threshold,
        settings.prefill_threshold(config.parallel.data_parallel_size),
    )
    if not settings.enable_dbo or max(2, decode) <= max_num_seqs or prefill <= max_num_batched_tokens:
        return []
    return [
        f"--enable-dbo: no step is halved: --dbo-prefill-token-threshold is {prefill} and a step has at most {max_num_batched_tokens} "
        f"tokens, --dbo-decode-token-threshold is {decode} and at most {max_num_seqs} requests decode; lower one of them "
        "(docs/moe.md has what halves gain)"
    ]


def of_rotation(spec: ModelSpec, max_model_len: int) -> Iterator[str]:
    """LongRoPE has two sets of factors, and a server has one table of angles."""
    rope = spec.rope
    original = rope.original_max_position_embeddings or spec.max_position_embeddings
    if rope.rope_type == "longrope" and rope.short_factor != rope.long_factor and max_model_len > original:
        yield (
            f"longrope: with --max-model-len {max_model_len} all texts are turned by long_factor, short ones too; "
            f"--max-model-len {original} takes short_factor, which texts of up to {original} tokens were trained with"
        )
