"""How many tokens a step drafts for each row: as many as give the most expected tokens in the expected time. Pure; used by drafts.py.

The chosen drafts are those of all rows with the greatest expected gains (acceptance.py), so many that a step's tokens over its time
(step_times.py) are the most: none, where drafts cost more than they give (cf. Liu et al. 2024, "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput"). A time that is not known is taken for short, and so is tried. What was worth nothing is
tried again now and then, for a bounded share of the time: rows without drafts, and numbers of drafts whose time was measured long ago.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from meshlm.protocol.edges.step import StepResult
from meshlm.runtime.process.counts import Counts
from meshlm.scheduler_proc.acceptance import F64, I64, Acceptance
from meshlm.scheduler_proc.drafts import GONE
from meshlm.scheduler_proc.step_times import Curve, StepTimes, drafts_at, place_of

WORTH = 1.01  # drafts are made for so many times the tokens a second of none
PROBE_SHARE = 0.005  # of the time, for each of the two kinds of probes
PROBE_AFTER = 8  # steps without drafts, at least, before a row gets one to see


class DraftBudget:
    """Of a rank with `max_rows` rows, for each of which the worker drafts up to `max_drafts` tokens."""

    def __init__(self, max_rows: int, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.acceptance, self.times = Acceptance(max_rows, max_drafts), StepTimes(max_drafts)
        self._position = np.arange(max_drafts)
        self._idle = np.zeros(max_rows, np.int32)  # steps without drafts, by row
        self._row_credit_s = self._time_credit_s = 0.0  # what probes may cost

    def begin(self, row: int) -> None:
        self.acceptance.begin(row)
        self._idle[row] = 0

    def verified(self, rows: Sequence[int], allowed: "array[int]", result: StepResult, told: Counts) -> None:
        """A step is over. Of each request that sampled: its row, -1 where it has none, GONE where it has ended; drafts that it was
        allowed. told: where drafts are counted."""
        of_rows, most = np.array(rows), np.frombuffer(allowed, np.int32)
        numbers = np.frombuffer(result.drafted, np.int32) if result.drafted else most
        given = np.frombuffer(result.counts, np.int32) if result.counts else np.ones(len(rows), np.int32)
        accepted = np.maximum(given - 1, 0)
        of_counted = accepted[(of_rows > GONE) & (numbers > 0)]
        by_number = np.bincount(of_counted, minlength=self.max_drafts + 1)
        told.add("spec_decode_num_drafts", amount=len(of_counted))
        told.add("spec_decode_num_draft_tokens", amount=int(numbers[of_rows > GONE].sum()))
        reached = by_number[::-1].cumsum()[::-1][1:].tolist()  # at least 1, 2, ... accepted
        told.add("spec_decode_num_accepted_tokens", amount=sum(reached))
        for position, number in enumerate(reached):
            if number:
                told.add("spec_decode_num_accepted_tokens_per_pos", str(position), number)
        learned = (of_rows >= 0) & (most > 0) & (given > 0)
        if learned.any():
            self.acceptance.observe(of_rows[learned], most[learned], accepted[learned])

    def choose(self, rows: Sequence[int], most: Sequence[int], left: int, token_s: float = 0.0) -> list[int]:
        """Drafts of each of these rows, of which each may have so many at most, and all together `left`. token_s: what a token adds at
        least, in a step that has prompts; 0: it has none."""
        num_rows, places, bounds = len(rows), np.array(rows), np.minimum(most, self.max_drafts)
        num_most = min(int(bounds.sum()), left)
        if num_most <= 0:
            return [0] * num_rows
        gains = np.where(self._position < bounds[:, None], self.acceptance.gains(places), -1.0)
        ordered = np.sort(gains, axis=None)[::-1][:num_most]
        curve = self.times.nearest(num_rows) if token_s else self.times.curve(num_rows)
        if curve is None:
            return _numbers(_hand_out(gains, ordered, num_most))
        numbers = np.arange(num_most + 1)
        tokens = num_rows + np.concatenate(([0.0], ordered.cumsum()))
        seconds = curve.seconds(numbers / num_rows)
        if token_s:
            seconds = np.maximum(seconds, seconds[0] + token_s * numbers)
        rates = tokens / seconds
        best = int(rates.argmax())
        if rates[best] < WORTH * rates[0]:
            best = 0
        self._row_credit_s += PROBE_SHARE * seconds[best]
        if not token_s:
            self._time_credit_s += PROBE_SHARE * seconds[best]
            best = self._probe_time(curve, num_rows, tokens, seconds, best)
        counts = _hand_out(gains, ordered, best)
        self._probe_rows(places, counts, bounds, seconds[best:])
        return _numbers(counts)

    def _probe_time(self, curve: Curve, num_rows: int, tokens: F64, seconds: F64, best: int) -> int:
        """`best`, or another number that may be better by now, if there is credit for what it costs by what is known."""
        rate = tokens[best] / seconds[best]
        for place in curve.stale():
            number = min(round(drafts_at(place) * num_rows), len(tokens) - 1)
            if place_of(number / num_rows) == place and tokens[number] > WORTH * rate * curve.least_s[place]:
                loss_s = max(0.0, float(seconds[number] - tokens[number] / rate))
                if loss_s > self._time_credit_s:
                    return best
                self._time_credit_s = min(self._time_credit_s - loss_s, seconds[best])
                curve.ask(place)
                return number
        return best

    def _probe_rows(self, rows: I64, counts: I64, bounds: I64, seconds: F64) -> None:
        """Gives one draft to rows that had none for long, as many as there is credit for. seconds: of the step with 0, 1 ... more."""
        idle = np.where(counts > 0, 0, self._idle[rows] + 1)
        stale = np.flatnonzero((idle >= PROBE_AFTER) & (bounds > 0))
        if len(stale):
            number = int(seconds.searchsorted(seconds[0] + self._row_credit_s, "right")) - 1
            probed = stale[np.argsort(-idle[stale], kind="stable")][:number]
            self._row_credit_s = min(self._row_credit_s - (seconds[len(probed)] - seconds[0]), seconds[0])
            counts[probed], idle[probed] = 1, 0
        self._idle[rows] = idle


def _numbers(counts: I64) -> list[int]:
    numbers: list[int] = counts.tolist()
    return numbers


def _hand_out(gains: F64, ordered: F64, number: int) -> I64:
    """int64[rows]: the drafts of each row when `number` go where `gains` are greatest. ordered: the gains, greatest first."""
    if not number:
        return np.zeros(len(gains), np.int64)
    least = ordered[number - 1]
    counts: I64 = (gains > least).sum(axis=1)
    equal = np.nonzero(gains == least)[0][: number - int(counts.sum())]
    counts += np.bincount(equal, minlength=len(gains))
    return counts
