"""The tuner of a worker's start: which way to compute each product is the fastest, within a bounded time.

It has neither a GPU nor a clock of its own: a `Bench` measures, in pieces, and says before each piece how long it will take about; what
would end behind the deadline is not begun. The plain way (cuBLAS, and kernels of their own for what stands beside a product) is always
among the candidates, and nothing else is taken that is not clearly faster. Called by workers/cuda/tuning.py.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshlm.kernels.tables import Table

Config = tuple[Any, ...]
Key = tuple[Any, ...]
Times = dict[Config, float]
"""Microseconds by candidate."""
Work = Generator[float, None, Times]
"""Pieces of work: yields, before each, the seconds that it is expected to take."""

PLAIN: Config = ()
GAIN = 0.985  # of the plain way's time, at most
NEAR = 2  # rows between two measured sizes, of which one is at most so many times the other, are the larger one's where both have won


class Operation(NamedTuple):
    """The description of an operation that is tuned."""

    key: tuple[str, ...]
    """The names of a key's sizes."""
    num_config: int
    """Numbers of a choice."""
    down_to: float = 0.85
    """A choice is for rows from so much of those it was measured with; less where the weights are what the time is made of."""
    of_one_size: bool = False
    """A library's algorithm: known for the measured number of rows alone."""
    in_tree: str = "products"
    """What the tree's table calls its entries."""


_EXPERTS = ("experts", "topk", "hidden", "wide")
OPERATIONS = {
    "gemv": Operation(("outputs", "inputs", "gate"), 4, in_tree="in_steps"),
    "packed_few": Operation(("outputs", "inputs", "use"), 3, down_to=0.25),
    "grouped_gemm": Operation(_EXPERTS, 19, down_to=0.5, in_tree="layers"),
    "packed_experts": Operation((*_EXPERTS, "format"), 7, down_to=0.25),
    "packed_experts_many": Operation((*_EXPERTS, "format"), 8, down_to=0.5),
    "gemm": Operation(("outputs", "inputs"), 10, of_one_size=True),
    "small_m_gemm": Operation(("outputs", "inputs", "use"), 6),
    "gate_up_silu": Operation(("outputs", "inputs"), 7),
}
"""Operations that are tuned, those of which most is to be had first."""


class Case(NamedTuple):
    """A product, or a layer of experts, of so many rows."""

    op: str
    key: Key
    rows: int


class Setting(NamedTuple):
    """Where it is measured, and how thoroughly."""

    device: torch.device
    dtype: torch.dtype
    max_rows: int
    full: bool = False


Run = Callable[[Tensor], Tensor]
"""From a weight to what the layer behind gets."""


class Ways(NamedTuple):
    """The plain way and all candidates to multiply with one of these weights."""

    weights: list[Tensor]
    runs: dict[Config, Run]
    reset: Callable[[], object] = lambda: None
    """To be called before a run whose result counts."""


class Bench(Protocol):
    """An operation that can be measured, and how."""

    def sizes(self, op: str, key: Key) -> list[int]:
        """Numbers of rows to measure; none where there is nothing to choose from."""
        ...

    def measure(self, case: Case) -> Work:
        """Gives the times of the plain way and of those candidates that compute the same; nothing where the plain way fails."""
        ...


class Outcome(NamedTuple):
    """How far the tuner came: shapes that are measured, and that are left for another time."""

    done: int
    left: int


def fastest(times: Times) -> Config:
    """The fastest candidate; the plain way unless another is clearly faster."""
    best = min(times, key=times.__getitem__, default=PLAIN)
    return best if PLAIN in times and times[best] <= GAIN * times[PLAIN] else PLAIN


def choices_of(entry: Table | None) -> dict[int, Config]:
    """The choices that an entry was made of, by rows."""
    measured = (entry or {}).get("measured", [])
    return {rows: tuple[Any, ...](config) for rows, config in measured}


def entry_of(op: str, key: Key, choices: dict[int, Config]) -> Table:
    """The entry of a table: rows above, up to, and what. Where the plain way was the fastest there is none."""
    rows: list[list[Any]] = []
    known = OPERATIONS[op]
    before, won = 0, False
    for size, config in sorted(choices.items()):
        if config != PLAIN:
            between = won and size <= NEAR * before and not known.of_one_size
            over = before if between else max(before, int(known.down_to * size))
            rows.append([over, size, list(config)])
        before, won = size, config != PLAIN
    measured = [[size, list(config)] for size, config in sorted(choices.items())]
    return {**dict(zip(known.key, key, strict=True)), "rows": rows, "measured": measured}


def in_order(wanted: Iterable[tuple[str, Key]]) -> list[tuple[str, Key]]:
    """Those that are tuned: by operation, the largest weights first."""
    order = list(OPERATIONS)
    mine = [(op, key) for op, key in wanted if op in OPERATIONS]
    return sorted(mine, key=lambda each: (order.index(each[0]), -each[1][0] * each[1][1]))


def tune(
    wanted: Iterable[tuple[str, Key]],
    bench: Bench,
    known: Callable[[str, Key], Table | None],
    keep: Callable[[str, Table], None],
    time_left: Callable[[], float],
    attempt: Callable[[str, Key], AbstractContextManager[None]] = lambda op, key: nullcontext(),
) -> Outcome:
    """Measures what is wanted and not known, until the time is over. `keep` gets each shape's entry, maybe of a part of its sizes: the
    next start goes on there. attempt: is entered for as long as a size is measured."""
    done = left = 0
    for op, key in in_order(wanted):
        choices = choices_of(known(op, key))
        missing = [size for size in bench.sizes(op, key) if size not in choices]
        before = len(choices)
        for size in missing:
            with attempt(op, key):
                times = _finished(bench.measure(Case(op, key, size)), time_left)
            if times is None:
                break
            if PLAIN in times:  # else nothing is known of this size: it is asked again at the next start
                choices[size] = fastest(times)
        if len(choices) > before:
            keep(op, entry_of(op, key, choices))
        complete = len(choices) == before + len(missing)
        done, left = done + complete, left + (not complete)
    return Outcome(done, left)


def _finished(work: Work, time_left: Callable[[], float]) -> Times | None:
    """Does the work, piece by piece; None if there was no time for the next one."""
    try:
        while True:
            if next(work) > time_left():
                work.close()
                return None
    except StopIteration as end:
        times: Times = end.value
        return times
