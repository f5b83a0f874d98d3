"""What changes in the rows before a step, as kernels/prepare_inputs's `scatter` takes it. Made by table.py; knows no row."""

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
NOTHING = np.empty(0, np.int32)


class Changes:
    """Runs of ints, each with its place in the state."""

    def __init__(self) -> None:
        self._segments: list[I32] = []  # [n, 3]: place, begin in the data, length
        self._data: list[I32] = []
        self._num_ints = 0

    def run(self, place: int, values: I32) -> None:
        self.runs(np.array([place]), np.array([len(values)]), values)

    def singles(self, places: I64, values: I32) -> None:
        self.runs(places, np.ones(len(values), np.int64), values)

    def runs(self, places: I64, lengths: I64, values: I32) -> None:
        """The first lengths[0] of the values go to places[0] and what follows it, the next ones to places[1] ..."""
        segments = np.empty((len(places), 3), np.int32)
        segments[:, 0], segments[:, 2] = places, lengths
        segments[:, 1] = np.cumsum(lengths) - lengths + self._num_ints
        self._segments.append(segments)
        self._data.append(values)
        self._num_ints += len(values)

    def packed(self) -> tuple[I32, int]:
        """Segments (place in the state, place in the data, length), then the data; and how many segments."""
        segments = np.concatenate(self._segments)
        return np.concatenate((segments.ravel(), *self._data)), len(segments)


def unpacked(changes: I32, segments: int) -> tuple[I64, I32]:
    """The place in the state of each value that changes, and the values."""
    table, data = changes[: 3 * segments].reshape(-1, 3), changes[3 * segments :]
    to, begin, lengths = table.T.astype(np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(to, lengths) + within, data[np.repeat(begin, lengths) + within]
