"""What the rows are told whose step gave them no token (kernels/sample/outcomes.py), or a vector that is none."""

import numpy as np
from numpy.typing import NDArray

from meshlm.kernels.sample.outcomes import NONE_LEFT
from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.wire.ids import ErrorKind

NO_TOKEN = RowFailed(
    "no token is left: what the request allows, bans and forbids to end (min_tokens) leaves none that may come"
)
NO_NUMBER = RowFailed("the model's logits are not numbers", ErrorKind.INTERNAL)


NO_VECTOR = RowFailed("the numbers of the model's vector are not finite", ErrorKind.INTERNAL)


def of_vectors(pooled: dict[int, bytes]) -> dict[int, RowFailed]:
    """By place in the batch, where a vector of float32 has a number that is infinite or none at all."""
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = {place: np.frombuffer(vector, np.float32).sum(dtype=np.float64) for place, vector in pooled.items()}
    return {place: NO_VECTOR for place, found in sums.items() if not np.isfinite(found)}


def of_tokens(tokens: NDArray[np.int32], places: NDArray[np.int64]) -> dict[int, RowFailed]:
    """By place in the batch, where `tokens` [l] has an outcome. places [l]: of the requests that sampled."""
    lines = np.flatnonzero(tokens < 0)
    return {int(places[line]): NO_TOKEN if tokens[line] == NONE_LEFT else NO_NUMBER for line in lines}
