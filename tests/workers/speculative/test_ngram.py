"""Prompt lookup gives what a search of all positions gives."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.workers.rows.changes import I32
from meshlm.workers.speculative.ngram import FEW, NgramDrafter, earlier_places

LAST = 2**31 - 1  # token ids
TEXTS = st.lists(st.sampled_from([0, 1, 7, LAST]), max_size=40) | st.builds(
    lambda motif, times, more: (motif * times)[: 2 * FEW] + more,
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(1, 2 * FEW),
    st.lists(st.integers(0, 3), max_size=9),
)


def places_of(text: list[int], length: int) -> list[int]:
    """The indices behind the earlier places of the last `length` tokens."""
    pattern = text[len(text) - length :]
    return [end for end in range(length, len(text)) if text[end - length : end] == pattern]


def draft_of(text: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for length in range(min(longest, len(text)), shortest - 1, -1):
        if places := places_of(text, length):
            return text[places[0] : places[0] + most]
    return []


def int32(*rows: list[int]) -> I32:
    width = max(map(len, rows), default=0)
    return np.array([row + [LAST] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 30))
def test_the_longest_match_and_all_its_places(text: list[int], longest: int) -> None:
    length, places = earlier_places(np.array(text, np.int32), longest)
    matches = [one for one in range(1, min(longest, len(text)) + 1) if places_of(text, one)]
    assert length == max(matches, default=0)
    assert places.tolist() == (places_of(text, length) if length else [])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(0, 9)), max_size=4), st.integers(1, 6), st.integers(0, 4))
def test_rows_have_the_drafts_that_a_search_of_all_positions_finds(
    rows: list[tuple[list[int], int]], shortest: int, more: int
) -> None:
    drafter = NgramDrafter(int32(*(text for text, _ in rows)), shortest, shortest + more)
    numbers = np.arange(len(rows), dtype=np.int32)[::-1]
    lens, most = np.array([len(text) for text, _ in rows], np.int64), np.array([most for _, most in rows], np.int32)
    drafts = drafter.propose(numbers, lens[::-1], most[::-1])
    found = [drafts.tokens[nth, :count].tolist() for nth, count in enumerate(drafts.counts.tolist())]
    assert found[::-1] == [draft_of(text, shortest, shortest + more, most) for text, most in rows]
    assert drafts.tokens.dtype == drafts.counts.dtype == np.int32


def test_of_several_places_the_first_gives_the_draft() -> None:
    drafter = NgramDrafter(int32([5, 6, 1, 5, 6, 2, 9, 5, 6]), 1, 3)
    drafts = drafter.propose(np.zeros(1, np.int32), np.array([9]), np.array([2], np.int32))
    assert drafts.tokens[0, : drafts.counts[0]].tolist() == [1, 5]


def test_what_stands_behind_the_known_tokens_is_not_looked_at() -> None:
    tokens = int32([1, 2, 3, 1, 2, 3, 1, 2])
    drafter, row = NgramDrafter(tokens, 2, 2), np.zeros(1, np.int32)
    counts = [int(drafter.propose(row, np.array([n]), np.array([9], np.int32)).counts[0]) for n in range(9)]
    assert counts == [0, 0, 0, 0, 0, 3, 3, 3, 6]
    tokens[0, :3] = [8, 8, 2]  # another request has the row
    assert drafter.propose(row, np.array([3]), np.array([9], np.int32)).counts.tolist() == [0]
