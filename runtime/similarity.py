"""How alike two texts are, by their vectors. Called by the frontend and by `LLM.score`."""

import math
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import mul

from meshlm.protocol.pool import Pool


def cosine(first: "array[float]", second: "array[float]") -> float:
    norm = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / norm if norm else 0.0


def max_sim(query: "Sequence[array[float]]", document: "Sequence[array[float]]") -> float:
    """The sum of each query token's best (Khattab and Zaharia 2020), in numpy, which only vectors of tokens load."""
    import numpy as np

    return float((np.array(query) @ np.array(document).T).max(axis=1).sum())


def of_tokens(flat: "array[float]", token_ids: Sequence[int], pool: Pool) -> "tuple[array[float], int]":
    """The vectors that the task gives out, and their number: of the tokens that end a step, where a tag says which; of all but the
    first and the last, where these are special; else of all."""
    if pool.step_tag_id < 0:
        begin = int(bool(token_ids) and token_ids[0] == pool.bos_token_id)
        end = len(token_ids) - int(len(token_ids) > begin and token_ids[-1] == pool.eos_token_id)
        if end - begin == len(token_ids):
            return flat, len(token_ids)
        size = len(flat) // len(token_ids)
        return flat[begin * size : end * size], end - begin
    lines = zip(lines_of(flat, len(token_ids)), token_ids, strict=True)
    found = [line for line, token in lines if token == pool.step_tag_id]
    return array("f", chain.from_iterable(found)), len(found)


def lines_of(flat: "array[float]", count: int) -> "list[array[float]]":
    """The vectors of `count` tokens, which stand one behind the other."""
    size = max(1, len(flat) // max(1, count))
    return [flat[at : at + size] for at in range(0, len(flat), size)]
