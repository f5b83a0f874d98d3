"""The tuner of a worker's start: which way to compute each product is the fastest, within a bounded time.

It has neither a GPU nor a clock of its own: a `Bench` measures, in pieces, and says before each piece how long it will take about; what
would end behind the deadline is not begun. The plain way (cuBLAS, and kernels of their own for what stands beside a product) is always
among the candidates, and nothing else is taken that is not clearly faster. Called by workers/cuda/tuning.py.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, Protocol

from meshlm.kernels.tables import Table

Config = tuple[Any, ...]
Key = tuple[Any, ...]
Times = dict[Config, float]
"""Microseconds by candidate."""
Work = Generator[float, None, Times]
"""Pieces of work: yields, before each, the seconds that it is expected to take."""

PLAIN: Config = ()
GAIN = 0.985  # of the plain way's time, at most
DOWN_TO = 0.85  # a choice is for rows from so much of those it was measured with
DOWN_TO_OF = {
    "grouped_gemm": 0.5,
    "packed_few": 0.25,
    "mxfp4_few": 0.25,
    "mxfp4_experts": 0.5,
}  # ... where the weights are what their time is made of
NEAR = (
    2  # rows between two measured sizes, one at most so many times the other, are the larger one's where both have won
)
NAMES = {
    "gemv": ("outputs", "inputs", "gate"),
    "packed_few": ("outputs", "inputs", "use"),
    "grouped_gemm": ("experts", "topk", "hidden", "wide"),
    "mxfp4_few": ("experts", "topk", "hidden", "wide"),
    "mxfp4_experts": ("experts", "topk", "hidden", "wide"),
    "gemm": ("outputs", "inputs"),
    "small_m_gemm": ("outputs", "inputs", "use"),
    "gate_up_silu": ("outputs", "inputs"),
}
"""Operations that are tuned, those of which most is to be had first, and the names of their keys."""
OF_ONE_SIZE = ("gemm",)  # a library's algorithm: known for the measured number of rows alone


class Case(NamedTuple):
    """A product, or a layer of experts, of so many rows."""

    op: str
    key: Key
    rows: int


class Bench(Protocol):
    """What can be measured, and how."""

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
    return {rows: _tuple(config) for rows, config in measured}


def _tuple(config: Any) -> Config:
    return tuple(config)


def entry_of(op: str, key: Key, choices: dict[int, Config]) -> Table:
    """The entry of a table: rows above, up to, and what. Where the plain way was the fastest there is none."""
    rows: list[list[Any]] = []
    before, won = 0, False
    for size, config in sorted(choices.items()):
        if config != PLAIN:
            between = won and size <= NEAR * before and op not in OF_ONE_SIZE
            rows.append(
                [before if between else max(before, int(DOWN_TO_OF.get(op, DOWN_TO) * size)), size, list(config)]
            )
        before, won = size, config != PLAIN
    measured = [[size, list(config)] for size, config in sorted(choices.items())]
    return {**dict(zip(NAMES[op], key, strict=True)), "rows": rows, "measured": measured}


def in_order(asked: Iterable[tuple[str, Key]]) -> list[tuple[str, Key]]:
    """Those that are tuned: by operation, the largest weights first."""
    order = list(NAMES)
    mine = [(op, key) for op, key in asked if op in NAMES]
    return sorted(mine, key=lambda each: (order.index(each[0]), -each[1][0] * each[1][1]))


def tune(
    asked: Iterable[tuple[str, Key]],
    bench: Bench,
    known: Callable[[str, Key], Table | None],
    keep: Callable[[str, Table], None],
    time_left: Callable[[], float],
) -> Outcome:
    """Measures what was asked for and is not known, until the time is over. `keep` gets each shape's entry, maybe of a part of its
    sizes: the next start goes on there."""
    done = left = 0
    for op, key in in_order(asked):
        choices = choices_of(known(op, key))
        missing = [size for size in bench.sizes(op, key) if size not in choices]
        before = len(choices)
        for size in missing:
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
