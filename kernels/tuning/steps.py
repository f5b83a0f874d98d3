"""Tiles of one row by what a whole decode step of a lone request takes: pure, `timed` measures.

What a kernel costs depends on those around it: with programmatic dependent launch each begins while the one before still runs, and the
space that it leaves on the multiprocessors decides how much of that comes true. So tiles that are the best alone are only the
beginning: one product after the other tries its tile's neighbours, and the best stays (coordinate descent). Called by
workers/cuda/tuning.py.
"""

from collections.abc import Callable
from typing import Any

Tile = tuple[int, int, int, int]
Choice = dict[Any, Tile]
Timed = Callable[[list[Choice]], list[float]]
"""Microseconds of a step with each choice; infinity where it cannot be launched."""

GAIN = 0.998  # of the step's time, at most
LIMITS = ((1, 64), (1, 8), (2, 6), (1, 16))


def near(tile: Tile) -> list[Tile]:
    """Tiles with one or two sizes doubled or halved. A tile is rows, warps, stages, programs per multiprocessor."""
    rows, warps, stages, programs = tile
    found = {(rows, warps, stages + 1, programs), (rows, warps, stages - 1, programs)}
    for by in (2, 0.5):
        found |= {(int(rows * by), warps, stages, programs), (rows, int(warps * by), stages, programs)}
        found |= {(rows, warps, stages, int(programs * by)), (int(rows * by), int(warps * by), stages, programs)}
        found |= {
            (int(rows * by), warps, stages, int(programs / by)),
            (rows, int(warps * by), stages, int(programs / by)),
        }
        found |= {(int(rows * by), int(warps * by), stages, int(programs / by))}
    return sorted(
        t for t in found - {tile} if all(low <= size <= high for size, (low, high) in zip(t, LIMITS, strict=True))
    )


def descend(
    start: Choice,
    timed: Timed,
    *,
    passes: int,
    is_over: Callable[[], bool],
    near_of: Callable[[Any], Callable[[Tile], list[Tile]]] = lambda name: near,
    note: Callable[[int, Any, float, float, Tile], None] = lambda *line: None,
) -> Choice:
    """One size after the other, until nothing is gained or the time is over: what was found by then.

    note: gets the pass, the name, microseconds before and of the best, and the tile that the name has then."""
    chosen = dict(start)
    for number in range(passes):
        before = dict(chosen)
        for name in list(chosen):
            if is_over():
                return chosen
            tiles = near_of(name)(chosen[name])
            usual, *times = timed([chosen, *({**chosen, name: tile} for tile in tiles)])
            best = min(times)
            if best <= GAIN * usual:
                chosen = {**chosen, name: tiles[times.index(best)]}
            note(number + 1, name, usual, best, chosen[name])
        if chosen == before:
            break
    return chosen
