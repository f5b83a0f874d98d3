"""How likely drafted tokens are accepted, by row and position, learnt from finished steps. Pure; owned by draft_budget.py.

A position counts as tried when the drafts before it were accepted, and as a failure when its own was refused or the worker drafted none
there: so an estimate is of what a step gains by allowing the position. The older a trial is, the less it counts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_KEEPS = 1 - 1 / 32  # what a trial leaves of the earlier ones of its row and position: about 32 count
RANK_KEEPS = 1 - 1 / 128  # ... and of all rows
ROW_PRIOR = 4.0  # trials of a row for which the rank's mean counts ...
RANK_PRIOR = 2.0  # ... and of a position of the rank for which the mean of the one before counts
FIRST_MEAN = 0.8  # while nothing is known

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Integers = NDArray[np.signedinteger[Any]] | Sequence[int]


class Acceptance:
    """Of `max_rows` rows and `max_drafts` positions each. Of a position that no step has reached, it is that of the one before."""

    def __init__(self, max_rows: int, max_drafts: int) -> None:
        self._position = np.arange(max_drafts)
        self._counts = np.zeros((max_rows, 2, max_drafts))  # trials, and those that were accepted
        self._rank = np.zeros((2, max_drafts))
        self._mean = np.full(max_drafts, FIRST_MEAN)

    def begin(self, row: int) -> None:
        """Another request has the row: nothing is known of it but the rank's mean."""
        self._counts[row] = 0

    def observe(self, rows: Integers, allowed: Integers, accepted: Integers) -> None:
        """A step allowed each of these rows so many drafts, at least one, and so many were accepted."""
        hits = np.array(accepted)[:, None]
        tried = (self._position <= hits) & (self._position < np.array(allowed)[:, None])
        news = np.stack((tried, tried & (self._position < hits)), axis=1)
        places = np.asarray(rows)
        found = self._counts.take(places, axis=0)
        found *= np.where(tried, ROW_KEEPS, 1.0)[:, None]
        self._counts[places] = found + news
        total = news.sum(axis=0)
        self._rank = self._rank * RANK_KEEPS ** total[0] + total
        mean = FIRST_MEAN
        for position, (trials, successes) in enumerate(self._rank.T.tolist()):
            self._mean[position] = mean = (successes + RANK_PRIOR * mean) / (trials + RANK_PRIOR)

    def gains(self, rows: I64) -> F64:
        """float64[rows, max_drafts]: tokens that each further draft of a row is expected to give, the product of the acceptance of the
        positions up to its own."""
        found = self._counts.take(rows, axis=0)
        estimates: F64 = (found[:, 1] + ROW_PRIOR * self._mean) / (found[:, 0] + ROW_PRIOR)
        return estimates.cumprod(axis=1)
