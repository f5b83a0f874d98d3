"""How alike two texts are, by their vectors. Called by the frontend and by `LLM.score`."""

import math
from array import array
from collections.abc import Sequence
from operator import mul


def cosine(first: "array[float]", second: "array[float]") -> float:
    norm = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / norm if norm else 0.0


def max_sim(query: "Sequence[array[float]]", document: "Sequence[array[float]]") -> float:
    """The sum of each query token's best (Khattab and Zaharia 2020), in numpy, which only vectors of tokens load."""
    import numpy as np

    return float((np.array(query) @ np.array(document).T).max(axis=1).sum())


def lines_of(flat: "array[float]", count: int) -> "list[array[float]]":
    """The vectors of `count` tokens, which stand one behind the other."""
    size = max(1, len(flat) // max(1, count))
    return [flat[at : at + size] for at in range(0, len(flat), size)]
