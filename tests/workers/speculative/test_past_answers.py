"""A sorted list of contexts gives what a look at all tokens of all answers gives."""

import tracemalloc
from collections import deque
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.workers.speculative import past_answers
from meshlm.workers.speculative.past_answers import MAX_PLACES, PastAnswers

LAST = 2**31 - 1
TOKENS = st.lists(st.sampled_from([0, 1, 256, LAST]), max_size=12)
Answer = tuple[list[int], list[int]]  # its prompt, and itself


def add(answers: PastAnswers, prompt: list[int], answer: list[int]) -> None:
    deque(answers.add(np.array(prompt + answer, np.int32), len(prompt)), 0)


def remove_oldest(answers: PastAnswers) -> None:
    deque(answers.remove_oldest(), 0)


def backwards(tokens: list[int]) -> bytes:
    return np.array(tokens[::-1], np.int32).tobytes()


def following(known: list[Answer], depth: int, context: list[int], limit: int) -> list[list[int]]:
    """What stands behind this context, the latest answers first."""
    found = []
    for prompt, answer in reversed(known):
        text = prompt + answer
        for at in range(len(prompt), len(text)):
            before = text[max(0, len(prompt) - depth) : at]
            if before[len(before) - len(context) :] == context and len(context) <= len(before):
                found.append(text[at : at + limit])
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.none() | st.tuples(TOKENS, TOKENS), max_size=12),
    TOKENS,
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_matches_and_continuations(
    changes: list[Answer | None], row: list[int], depth: int, block: int, limit: int
) -> None:
    """None: the oldest answer leaves."""
    with patch.object(past_answers, "BLOCK", block), patch.object(past_answers, "MAX_PLACES", 1000):
        answers, known = PastAnswers(depth), []
        for change in changes:
            if change is not None:
                add(answers, *change)
                known.append(change)
            elif known:
                remove_oldest(answers)
                del known[0]
        assert len(answers) == len(known)
        context = row[-depth:]
        matches = [n for n in range(1, len(context) + 1) if following(known, depth, context[len(context) - n :], 1)]
        length = answers.longest_match(backwards(context))
        assert length == max(matches, default=0)
        if length:
            context = context[len(context) - length :]
            assert answers.continuations(backwards(context), limit) == following(known, depth, context, limit)


def test_an_answer_is_known_place_by_place() -> None:
    answers = PastAnswers(4)
    steps = answers.add(np.array([1, 2, 3, 4], np.int32), 1)
    found = []
    for _ in steps:
        found.append([answers.longest_match(backwards([1, 2, 3][: n + 1])) for n in range(3)])
    assert found == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]


def test_of_many_places_some_from_all_over_them_are_looked_at() -> None:
    answers = PastAnswers(2)
    for before in range(100):
        for _ in range(30):
            add(answers, [before, 5], [before])
    found = answers.continuations(backwards([5]), 1)
    assert MAX_PLACES / 2 <= len(found) <= 2 * MAX_PLACES
    assert len({token for (token,) in found}) > MAX_PLACES / 4


def test_memory_is_given_back() -> None:
    answers = PastAnswers(24)
    rng = np.random.default_rng(0)
    used = []
    tracemalloc.start()
    try:
        for nth in range(400):
            add(answers, [1, 2], rng.integers(0, 50, 100).tolist())
            if nth >= 40:
                remove_oldest(answers)
            if nth in (60, 399):
                used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert used[1] < 1.3 * used[0]
    assert used[1] < 30 * 40 * 100  # bytes of a token
    for _ in range(40):
        remove_oldest(answers)
    assert len(answers) == 0
    assert answers.longest_match(backwards([1, 2])) == 0
