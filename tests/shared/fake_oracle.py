"""The tokens and vectors that the fake model (workers/fake) must give, computed in another way."""

import numpy as np

from meshlm.protocol.pool import PoolKind
from meshlm.workers.fake.tokens import FACTOR, FIRST_TOKEN, vectors


def expected_token(tokens: list[int], vocab_size: int) -> int:
    """The token that the fake model gives after `tokens`; the tests' oracle."""
    state = 0
    for token in tokens:
        state = (state * FACTOR + token + 1) & 0xFFFF_FFFF_FFFF_FFFF
    return FIRST_TOKEN + (state >> 33) % (vocab_size - FIRST_TOKEN)


def expected_vector(tokens: list[int], kind: PoolKind) -> list[float]:
    """The vector that the fake model's Pool gives for a prompt; the tests' oracle."""
    state, states = 0, []
    for token in tokens:
        state = (state * FACTOR + token + 1) & 0xFFFF_FFFF_FFFF_FFFF
        states.append(state)
    all_of = vectors(np.array(states, np.uint64))
    mean = all_of.sum(0) / len(tokens)
    kinds = {PoolKind.LAST: all_of[-1], PoolKind.MEAN: mean, PoolKind.CLS: all_of[0], PoolKind.ALL: all_of}
    found = all_of.max(0) if kind is PoolKind.SPLADE else kinds[kind]
    return [float(value) for value in found.astype(np.float32).flatten()]
