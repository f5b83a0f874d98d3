"""Recurrent states in one step: which page each request goes on from, and where its state, and the checkpoints on the way, go to.

A request goes on from the page of the token before its first one, and leaves its state in that of its last one. A prompt leaves
states on the way where its table names another page next (protocol/kv.py: RecurrentState).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.workers.batch import StateCache


class WrongStates(Exception):
    """A model does not give by the kernels what plain torch gives (engine/state_self_test.py); the text says how far off it is."""


class StepStates(Protocol):
    """What layers with states compute, for one step and the layers of one group. Everything is [t, ...], by the step's tokens; states
    are read from and left in the cache."""

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, *, silu: bool = True) -> Tensor:
        """x [t, channels], weight [channels, kernel] -> the causal convolution, or its silu (kernels/causal_conv)."""
        ...

    def ssd(self, x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, cache: StateCache) -> Tensor:
        """x [t, heads, P], a, d [heads], b, c [t, groups, N] -> [t, heads, P] (kernels/ssd)."""
        ...

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, cache: StateCache
    ) -> Tensor:
        """x, gate and dt (before its softplus) [t, channels], a float32 [channels, N], b, c [t, N], d float32 [channels]
        -> [t, channels]: the scan's y silu(gate) (kernels/selective_scan)."""
        ...

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, cache: StateCache
    ) -> Tensor:
        """q, k [t, groups, K] of any length, v [t, heads, V], a, b [t, heads], rate, bias float32 [heads] -> [t, heads, V]
        (kernels/gated_delta/reference.py says what becomes of them)."""
        ...


class Segment(NamedTuple):
    """Tokens of one prompt from one checkpoint to the next."""

    begin: int  # of the step's tokens
    end: int
    read: int  # page; -1: the sequence begins here
    write: int


def segments(table: Sequence[int], start: int, count: int, first: int, block_size: int) -> list[Segment]:
    """The segments of `count` tokens from position `start` on, which are token `first` and those behind it of the step."""
    found: list[Segment] = []
    at, end = start, start + count
    read = table[(start - 1) // block_size] if start else -1
    while at < end:
        last = at // block_size
        while (last + 1) * block_size < end and table[last + 1] == table[last]:
            last += 1
        stop = min(end, (last + 1) * block_size)
        found.append(Segment(first + at - start, first + stop - start, read, table[last]))
        read, at = table[last], stop
    return found
