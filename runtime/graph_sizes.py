"""Which graphs --cudagraph-capture-sizes asks for, in tokens. The supervisor checks them before a start, workers capture them."""

from collections.abc import Iterable

LEAST_MIXED = 128
"""Tokens of the smallest graph of steps with prompts: shorter steps are padded to it."""


def of_decodes(sizes: Iterable[int], max_num_seqs: int) -> list[int]:
    """Sizes of graphs of decodes, one token for each request."""
    return sorted({size for size in sizes if size <= max_num_seqs})


def of_mixed(sizes: Iterable[int], max_num_batched_tokens: int) -> list[int]:
    """Sizes of graphs of steps with prompts."""
    return sorted({size for size in sizes if LEAST_MIXED <= size <= max(max_num_batched_tokens, LEAST_MIXED)})
