"""Which tiles whole steps are tried with, and what is kept of them: pure, times are made up."""

import math
from typing import Any

import pytest

from meshlm.kernels.tuning import steps


def test_neighbours_of_a_tile_of_gemv() -> None:
    near = steps.near((4, 4, 3, 2))
    assert near == sorted(set(near))
    assert (4, 4, 3, 2) not in near
    alone = {
        (8, 4, 3, 2),
        (2, 4, 3, 2),
        (4, 8, 3, 2),
        (4, 2, 3, 2),
        (4, 4, 2, 2),
        (4, 4, 4, 2),
        (4, 4, 3, 4),
        (4, 4, 3, 1),
    }
    rows_and_warps = {(8, 8, 3, 2), (2, 2, 3, 2)}
    against_programs = {(8, 4, 3, 1), (2, 4, 3, 4), (4, 8, 3, 1), (4, 2, 3, 4), (8, 8, 3, 1), (2, 2, 3, 4)}
    assert {*near} == alone | rows_and_warps | against_programs


@pytest.mark.parametrize("tile", [(1, 1, 2, 1), (64, 8, 6, 16), (1, 8, 4, 16)])
def test_no_neighbour_of_gemv_is_beyond_the_limits(tile: tuple[int, int, int, int]) -> None:
    near = steps.near(tile)
    assert near
    assert all(1 <= n <= 64 and 1 <= w <= 8 and 2 <= s <= 6 and 1 <= p <= 16 for n, w, s, p in near)
    assert all(size & (size - 1) == 0 for n, w, _, p in near for size in (n, w, p))


class Sum:
    """Stands for a step whose time is the sum of its tiles' rows, of which fewer than `least` have no room."""

    def __init__(self, least: int = 1) -> None:
        self.least, self.looks = least, 0

    def __call__(self, choices: list[steps.Choice]) -> list[float]:
        self.looks += 1
        return [
            math.inf if any(tile[0] < self.least for tile in one.values()) else float(sum(t[0] for t in one.values()))
            for one in choices
        ]


START: steps.Choice = {"a": (8, 4, 3, 2), "b": (4, 4, 3, 2)}


def rows(chosen: steps.Choice) -> list[int]:
    return [chosen[name][0] for name in ("a", "b")]


@pytest.mark.parametrize(("passes", "found"), [(1, [4, 2]), (2, [2, 1]), (9, [1, 1])])
def test_each_pass_takes_the_best_neighbour_of_each(passes: int, found: list[int]) -> None:
    lines: list[Any] = []
    chosen = steps.descend(START, Sum(), passes=passes, is_over=lambda: False, note=lambda *line: lines.append(line))
    assert rows(chosen) == found
    assert lines[0] == (1, "a", 12.0, 8.0, chosen["a"] if passes == 1 else lines[0][4])
    assert len(lines) == 2 * min(passes, 4), "the fourth pass finds nothing"
    assert rows(START) == [8, 4]


def test_what_has_no_room_is_not_taken() -> None:
    assert rows(steps.descend(START, Sum(least=4), passes=9, is_over=lambda: False)) == [4, 4]


def test_the_time_is_over_between_two_sizes() -> None:
    timed = Sum()
    assert rows(steps.descend(START, timed, passes=9, is_over=lambda: timed.looks == 3)) == [2, 2]


def test_a_little_faster_is_not_faster() -> None:
    def timed(choices: list[steps.Choice]) -> list[float]:
        return [100.0] + [99.9] * (len(choices) - 1)

    assert steps.descend(START, timed, passes=3, is_over=lambda: False) == START
