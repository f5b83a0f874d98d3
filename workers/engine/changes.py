"""What changes in the rows before a step, as kernels/prepare_inputs's `scatter` takes it. Made by rows.py; knows no row."""

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class Changes:
    """Runs of ints and single ones, with their places in the state; first all runs, then all single ones."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, int]] = []  # place, begin in the data, length
        self._singles: list[I32] = []  # the same, [n, 3]
        self._data: list[I32] = []
        self._num_ints = 0

    def run(self, place: int, values: I32) -> None:
        """values go to `place` and what follows it."""
        self._runs.append((place, self._num_ints, len(values)))
        self._append(values)

    def one(self, place: int, value: float, dtype: type[np.generic]) -> None:
        """A value of 32 or 64 bits."""
        self.run(place, np.array([value], dtype).view(np.int32))

    def singles(self, places: NDArray[np.int64] | I32, values: I32) -> None:
        """Each value goes to its own place."""
        segments = np.empty((len(values), 3), np.int32)
        segments[:, 0] = places
        segments[:, 1] = np.arange(self._num_ints, self._num_ints + len(values))
        segments[:, 2] = 1
        self._singles.append(segments)
        self._append(values)

    def _append(self, values: I32) -> None:
        self._data.append(values)
        self._num_ints += len(values)

    def packed(self) -> tuple[I32, int]:
        """Segments (place in the state, place in the data, length), then the data; and how many segments."""
        segments = np.concatenate((np.array(self._runs, np.int32).reshape(-1, 3), *self._singles))
        return np.concatenate((segments.ravel(), *self._data)), len(segments)
