"""How alike two texts are, by their vectors. Called by the frontend and by `LLM.score`."""

import math
from array import array
from collections.abc import Sequence
from itertools import chain
from operator import mul


def cosine(first: "array[float]", second: "array[float]") -> float:
    norm = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / norm if norm else 0.0


def max_sim(query: "Sequence[array[float]]", document: "Sequence[array[float]]") -> float:
    """The sum of each query token's best (Khattab and Zaharia 2020), in numpy, which only vectors of tokens load."""
    import numpy as np

    return float((np.array(query) @ np.array(document).T).max(axis=1).sum())


def of_steps(flat: "array[float]", token_ids: Sequence[int], step_tag_id: int) -> "tuple[array[float], int]":
    """The vectors of the tokens that end a step, where a tag says which, and their number; else of all."""
    if step_tag_id < 0:
        return flat, len(token_ids)
    found = [
        line for line, token in zip(lines_of(flat, len(token_ids)), token_ids, strict=True) if token == step_tag_id
    ]
    return array("f", chain.from_iterable(found)), len(found)


def lines_of(flat: "array[float]", count: int) -> "list[array[float]]":
    """The vectors of `count` tokens, which stand one behind the other."""
    size = max(1, len(flat) // max(1, count))
    return [flat[at : at + size] for at in range(0, len(flat), size)]
