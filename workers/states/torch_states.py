"""Recurrent states in one step, and in plain torch: decodes side by side, prompts one after the other.

A request goes on from the page of the token before its first one, and leaves its state in that of its last one. A prompt leaves
states on the way where its table names another page next (protocol/kv.py: RecurrentState).

The tokens of a request with drafts are computed as decodes are, one after the other, so they give what decodes give. Each leaves its
state in a page of its own (states/drafted.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.causal_conv.reference import causal_conv, conv_update
from meshlm.kernels.gated_delta.reference import chunk_rule, gates, rule_update, unit
from meshlm.kernels.selective_scan.reference import scan_update, selective_scan
from meshlm.kernels.ssd.reference import TimeSteps, chunk_scan, state_update
from meshlm.workers.batch import StateCache, StepInputs


class WrongStates(Exception):
    """A model does not give by the kernels what plain torch gives (engine/state_self_test.py); the text says how far off it is."""


class StepStates(Protocol):
    """The operations of layers with states, for one step and the layers of one group. All is [t, ...], by the step's tokens; states
    are read from and left in the cache."""

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, *, silu: bool = True) -> Tensor:
        """x [t, channels], weight [channels, kernel] -> the causal convolution, or its silu (kernels/causal_conv)."""

    def ssd(self, x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, cache: StateCache) -> Tensor:
        """x [t, heads, P], a, d [heads], b, c [t, groups, N] -> [t, heads, P] (kernels/ssd)."""

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, cache: StateCache
    ) -> Tensor:
        """x, gate and dt (before its softplus) [t, channels], a float32 [channels, N], b, c [t, N], d float32 [channels]
        -> [t, channels]: the scan's y silu(gate) (kernels/selective_scan)."""

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, cache: StateCache
    ) -> Tensor:
        """q, k [t, groups, K] of any length, v [t, heads, V], a, b [t, heads], rate, bias float32 [heads] -> [t, heads, V]
        (kernels/gated_delta/reference.py says what becomes of them)."""


class Segment(NamedTuple):
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


class Round(NamedTuple):
    """One token of each of r requests, side by side."""

    tokens: slice | Tensor  # int64 [r] of the step's tokens
    begins: Tensor  # bool [r]: the sequence begins here
    read: Tensor  # int64 [r] pages
    write: Tensor


Update = Callable[..., tuple[Tensor, Tensor]]


def read_states(halves: Tensor, pages: Tensor, lines: int) -> Tensor:
    """halves [2, pages, half of the lines, ...] -> [n, lines, ...]."""
    return halves[:, pages].transpose(0, 1).flatten(1, 2)[:, :lines]


def write_states(halves: Tensor, pages: Tensor, values: Tensor) -> None:
    """values [n, lines, ...]; an odd number of lines leaves the last place as it is."""
    half = halves.shape[2]
    halves[0, pages] = values[:, :half].to(halves.dtype)
    halves[1, pages, : values.shape[1] - half] = values[:, half:].to(halves.dtype)


class TorchStates:
    """See `StepStates`. Made once for the layers of a group."""

    def __init__(self, batch: StepInputs, group: int, block_size: int) -> None:
        assert batch.lens is not None
        table, n = batch.block_tables[group], batch.num_decodes
        self._table, self._positions, self._size = table, batch.positions, block_size
        self._device = table.device
        self._segments: list[Segment] = []
        first, lens, alone = n, batch.lens, list(range(n))
        drafted = batch.draft_pages[group] if batch.draft_pages else None
        for place, (count, length) in enumerate(zip(lens.query_lens, lens.context_lens, strict=True), n):
            if drafted is not None and (count == 1 or drafted[place, 0] >= 0):
                alone.append(place)
            else:
                self._segments += segments(table[place].tolist(), length - count, count, first, block_size)
            first += count
        self._rounds: list[Round] = []
        if drafted is not None:
            counts = torch.tensor((1,) * n + lens.query_lens, device=self._device)
            self._add_rounds(torch.tensor(alone, device=self._device), counts, drafted)
        elif n:
            self._rounds.append(self._round(torch.arange(n, device=self._device), slice(0, n)))

    def _round(self, places: Tensor, tokens: slice | Tensor) -> Round:
        """These tokens of requests, which go on from where their block tables say, and leave their states there."""
        at, table = self._positions[tokens][:, None], self._table[places]
        read = table.gather(1, (at - 1).clamp(min=0) // self._size)[:, 0]
        return Round(tokens, (at == 0)[:, 0], read, table.gather(1, at // self._size)[:, 0])

    def _add_rounds(self, places: Tensor, counts: Tensor, drafted: Tensor) -> None:
        """The rounds of the requests at `places`: the first tokens of all, then the second ones of those that have any, and so on.
        drafted: as StepInputs.draft_pages."""
        firsts = counts.cumsum(0) - counts
        for nth in range(int(counts[places].max())):
            places = places[counts[places] > nth]
            pages = drafted[places, nth]
            one = self._round(places, firsts[places] + nth)
            read = drafted[places, nth - 1] if nth else one.read
            self._rounds.append(one._replace(read=read, write=torch.where(pages < 0, one.write, pages)))

    def _run(
        self,
        halves: Tensor,
        lines: int,
        inputs: tuple[Tensor, ...],
        rest: tuple[Tensor | None, ...],
        of_one: Update,
        of_all: Update,
    ) -> Tensor:
        """of_one takes the inputs of a segment, `rest` and its state, of_all the same of one token of each decode. Both give outputs
        and states."""
        parts: list[tuple[slice | Tensor, Tensor]] = []
        for tokens, begins, read_from, write_to in self._rounds:
            state = read_states(halves, read_from, lines)
            state = torch.where(begins.view(-1, *[1] * (state.dim() - 1)), 0, state)
            out, state = of_all(*(each[tokens] for each in inputs), *rest, state)
            write_states(halves, write_to, state)
            parts.append((tokens, out))
        for begin, end, read, write in self._segments:
            pages = torch.tensor([max(read, 0), write], device=self._device)
            before = read_states(halves, pages[:1], lines)[0] if read >= 0 else None
            out, state = of_one(*(each[begin:end] for each in inputs), *rest, before)
            write_states(halves, pages[1:], state[None])
            parts.append((slice(begin, end), out))
        if len(parts) == 1:
            return parts[0][1]
        found = parts[0][1].new_empty(len(inputs[0]), *parts[0][1].shape[1:])
        for tokens, out in parts:
            found[tokens] = out
        return found

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, *, silu: bool = True) -> Tensor:
        of_one, of_all = partial(causal_conv, silu=silu), partial(conv_update, silu=silu)
        return self._run(cache.conv, x.shape[1], (x,), (weight, bias), of_one, of_all)

    def ssd(self, x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, cache: StateCache) -> Tensor:
        def ordered(of: Update) -> Update:
            return lambda x, dt, b, c, state: of(x, dt, a, b, c, d, None if state is None else state.float())

        inputs = (x.float(), steps.values(), b.float(), c.float())
        return self._run(cache.ssm, x.shape[1], inputs, (), ordered(chunk_scan), ordered(state_update)).to(x.dtype)

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, cache: StateCache
    ) -> Tensor:
        def ordered(of: Update) -> Update:
            def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
                y, state = of(x, dt, a, b, c, d, None if state is None else state.float().squeeze(-2))
                return y, state.unsqueeze(-2)

            return run

        inputs = (x.float(), F.softplus(dt.float()), b.float(), c.float())
        found = self._run(cache.ssm, x.shape[1], inputs, (), ordered(selective_scan), ordered(scan_update))
        return found.to(x.dtype) * F.silu(gate)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, cache: StateCache
    ) -> Tensor:
        def ordered(of: Update) -> Update:
            return lambda *inputs: of(*inputs[:-1], None if inputs[-1] is None else inputs[-1].float())

        each = v.shape[1] // k.shape[1]
        inputs = (unit(q, each) * q.shape[2] ** -0.5, unit(k, each), v.float(), *gates(a, b, rate, bias))
        return self._run(cache.ssm, v.shape[1], inputs, (), ordered(chunk_rule), ordered(rule_update)).to(v.dtype)
