"""Which decodes share prefixes, and how they are laid out for the kernel: pure, no GPU."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from meshlm.kernels.attention.kernel import ITEM, PREFIX_STEP
from meshlm.kernels.attention.tiles import SharedSizes, shared_sizes
from meshlm.workers.rows import shared_prefixes
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.shared_prefixes import Clusters, Interval, PrefixTables, partition

SIZES = SharedSizes(4, 12)
PAGE = 16
STEPS = PREFIX_STEP // PAGE  # pages of a step


@pytest.fixture(autouse=True)
def anything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_OF_CLUSTER", 1)


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


def saved(clusters: list[Interval]) -> int:
    return sum((end - first - 1) * tokens for first, end, tokens in clusters)


def best(common: list[int]) -> int:
    """By trying all ways to cut."""
    most = [0]
    for end in range(1, len(common) + 2):
        whole = [
            most[first] + (end - first - 1) * min(common[first : end - 1]) if end - first > 1 else most[first]
            for first in range(end)
        ]
        most.append(max(whole))
    return most[-1]


def depths(common: list[int], low: int = 0) -> int:
    """What is saved at the most where a cluster is cut at its least common edges or not at all."""
    if not common:
        return 0
    least = min(common)
    parts, part = [], list[int]()
    for edge in common:
        if edge == least:
            parts.append(part)
            part = []
        else:
            part.append(edge)
    return max(least * len(common), sum(depths(part) for part in [*parts, part]))


@given(st.lists(st.integers(0, 5), max_size=12))
def test_clusters_are_apart_and_save_what_they_can(common: list[int]) -> None:
    found = partition(common)
    assert found == sorted(found)
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    assert all(end - first > 1 and tokens == min(common[first : end - 1]) > 0 for first, end, tokens in found)
    assert saved(found) == depths(common) <= best(common)


def test_a_short_prefix_of_all_gives_way_to_long_ones_of_some() -> None:
    """And stays where those save less."""
    assert partition([4, 1, 4]) == [(0, 2, 4), (2, 4, 4)]
    assert partition([4, 3, 4]) == [(0, 4, 3)]
    assert partition([0, 2, 2, 0, 9]) == [(1, 4, 2), (4, 6, 9)]
    assert partition([]) == partition([0, 0]) == []


@st.composite
def trees(draw: st.DrawFn) -> list[I32]:
    """Block tables that grew from one another: each begins with some pages of an earlier one."""
    tables: list[I32] = []
    page = 1
    for _ in range(draw(st.integers(1, 9))):
        own = draw(st.integers(0, 3 * STEPS))
        begin = ints()
        if tables and draw(st.integers(0, 1)) > 0:
            parent = tables[draw(st.integers(0, len(tables) - 1))]
            begin = parent[: draw(st.integers(0, len(parent)))]
        tables.append(np.concatenate((begin, np.arange(page, page + own + 1, dtype=np.int32))))
        page += own + 1
    return tables


@given(trees(), st.data())
def test_what_is_found_is_shared(tables: list[I32], data: st.DataObject) -> None:
    """Whatever rows are taken, taken again and in whatever order a step has them."""
    prefixes = PrefixTables(0, PAGE, 12, SIZES, 1)
    rows = data.draw(st.permutations(range(12)))[: len(tables)]
    for row in data.draw(st.lists(st.sampled_from(rows))):
        prefixes.take(row, data.draw(st.sampled_from(tables)))
    for row, table in zip(rows, tables, strict=True):
        prefixes.take(row, table)
    some = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True))
    starts = ints(*(len(tables[n]) * PAGE - 1 - data.draw(st.integers(0, PAGE - 1)) for n in some))
    chosen = ints(*(rows[n] for n in some))
    clusters = prefixes.of_decodes(chosen, starts)
    pairs = [
        _shared(tables[a], tables[b], int(min(starts[i], starts[j])))
        for i, a in enumerate(some)
        for j, b in enumerate(some[:i])
    ]
    if clusters is None:
        assert not any(pairs)
        return
    assert clusters.saved >= max(pairs)
    assert len(set(clusters.places.tolist())) == len(clusters.places) == clusters.sizes.sum()
    begin = 0
    for size, tokens in zip(clusters.sizes.tolist(), clusters.tokens.tolist(), strict=True):
        members = clusters.places[begin : begin + size]
        begin += size
        assert size > 1
        assert tokens % PREFIX_STEP == 0 < tokens
        assert (starts[members] >= tokens).all()
        first, *others = (tables[some[place]][: tokens // PAGE] for place in members.tolist())
        assert all(np.array_equal(first, other) for other in others)
    size = data.draw(st.integers(len(some), 13))
    check(prefixes.packed(clusters, size), clusters, prefixes, size)


def _shared(first: I32, second: I32, tokens: int) -> int:
    count = min(len(first), len(second))
    differs = np.flatnonzero(first[:count] != second[:count])
    pages = int(differs[0]) if len(differs) else count
    return min(pages * PAGE, tokens) // PREFIX_STEP * PREFIX_STEP


def check(packed: I32, clusters: Clusters, prefixes: PrefixTables, size: int) -> None:
    """Each request meets each key of its prefix once, and the pieces of a prefix are numbered."""
    at = prefixes.offsets(size)
    assert len(packed) == at[-1]
    sizes = prefixes.sizes
    items = packed[: ITEM * sizes.num_items(size)].reshape(-1, ITEM)
    members, tokens, parts = (packed[begin : begin + size] for begin in at[1:4])
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for low, count, first, end, slot in items.tolist():
        assert count <= sizes.tile
        assert first % PREFIX_STEP == end % PREFIX_STEP == 0
        assert (first < end) == (count > 0)
        for place in members[low : low + count].tolist():
            seen.setdefault(place, []).append((slot, first, end))
    assert sorted(seen) == sorted(clusters.places.tolist())
    for place in range(size):
        pieces = sorted(seen.get(place, []))
        assert [slot for slot, _, _ in pieces] == list(range(parts[place]))
        ends = [0] + [end for _, _, end in pieces]
        assert [first for _, first, _ in pieces] == ends[:-1]
        assert ends[-1] == tokens[place]
    assert parts.max() <= sizes.most_parts(size)


@given(st.data(), st.sampled_from([(32, 8), (16, 8), (32, 4), (32, 32), (8, 1), (16, 1), (28, 4)]))
def test_there_is_room_for_any_clusters(data: st.DataObject, heads: tuple[int, int]) -> None:
    """Of as many requests as a step has; so many parts that they fill a GPU, where all share one prefix."""
    sizes = shared_sizes(*heads, 132)
    assert sizes is not None
    counts = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=20))
    lengths = [PREFIX_STEP * data.draw(st.integers(1, 80)) for _ in counts]
    size = sum(counts) + data.draw(st.integers(0, 9))
    prefixes = PrefixTables(0, PAGE, size, sizes, 1)
    places = np.array(data.draw(st.permutations(range(sum(counts)))), np.int32)
    clusters = Clusters(places, np.array(counts), np.array(lengths))
    check(prefixes.packed(clusters, size), clusters, prefixes, size)


def test_heads_that_fill_a_tile_alone_share_nothing() -> None:
    assert shared_sizes(71, 1, 132) is None
    assert shared_sizes(32, 8, 132) == SharedSizes(16, 33)


def test_a_step_like_the_last_one_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = PrefixTables(0, PAGE, 4, SIZES, 1)
    table = np.arange(1, 40, dtype=np.int32)
    for row in range(3):
        prefixes.take(row, table)
    rows, starts = ints(0, 1, 2), ints(300, 300, 300)
    first = prefixes.of_decodes(rows, starts)
    assert first is not None
    assert first.tokens.tolist() == [256]
    packed = prefixes.packed(first, 3)
    assert prefixes.of_decodes(rows, starts + 1) is first
    assert prefixes.packed(first, 3) is packed
    assert prefixes.packed(first, 4) is not packed
    prefixes.take(2, ints(*range(1, 5), *range(100, 130)))
    other = prefixes.of_decodes(rows, starts)
    assert other is not None
    assert (other.sizes.tolist(), other.tokens.tolist()) == ([2], [256])
    prefixes.reset()
    assert prefixes.of_decodes(rows, starts) is None


def test_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 512)
    monkeypatch.setattr(shared_prefixes, "LEAST_OF_CLUSTER", 256)
    prefixes = PrefixTables(0, PAGE, 8, SIZES, 1)
    for row, first in enumerate((1, 1, 1, 500, 500, 900)):
        prefixes.take(row, np.arange(first, first + (17 if first == 1 else 8), dtype=np.int32))
    found = prefixes.of_decodes(ints(5, 4, 3, 2, 1, 0), ints(*[400] * 6))
    assert found is not None
    assert sorted(found.places.tolist()) == [3, 4, 5]  # two others save 128 tokens
    assert prefixes.of_decodes(ints(0, 1, 3, 4), ints(*[400] * 4)) is None
