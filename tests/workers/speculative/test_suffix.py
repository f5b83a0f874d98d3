"""Suffix decoding drafts what a look at all positions of the row and of all past answers of its group gives."""

import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from typing import cast
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative import suffix
from meshlm.workers.speculative.suffix import SuffixDrafter

ROWS, WIDTH, LAST = 3, 400, 2**31 - 1
CONFIG = SpeculativeConfig(method="suffix")


class Server:
    """A drafter and what an engine does with it."""

    def __init__(self, config: SpeculativeConfig = CONFIG) -> None:
        self.tokens = np.full((ROWS, WIDTH), LAST, np.int32)
        self.lens = np.zeros(ROWS, np.int64)
        self.drafter = SuffixDrafter(self.tokens, config)

    def add(self, row: int, tokens: list[int], group: bytes = b"") -> None:
        ids = np.array(tokens, np.int32)
        new = NewRow(Row(row), ids.tobytes(), min(1, len(ids)), b"", SamplingParams(), group=group)
        self.drafter.add_row(new)
        self.tokens[row, : len(ids)], self.lens[row] = ids, len(ids)

    def sample(self, row: int, tokens: list[int]) -> None:
        self.tokens[row, self.lens[row] : self.lens[row] + len(tokens)] = tokens
        self.lens[row] += len(tokens)

    def remove(self, row: int) -> None:
        self.drafter.remove_row(row, int(self.lens[row]))
        self.tokens[row] = LAST

    def answer(self, prompt: list[int], tokens: list[int], group: bytes = b"", row: int = 2) -> None:
        """A request from its begin to its end."""
        self.add(row, prompt, group)
        self.sample(row, tokens)
        self.remove(row)

    def draft(self, row: int, most: int = 15, steps: int = 1) -> list[int]:
        """Of the last of so many steps."""
        for _ in range(steps):
            self.drafter.computed(cast(StepColumns, None), np.ones(1, np.int32), torch.empty(0))
            drafts = self.drafter.propose(np.array([row], np.int32), self.lens[[row]], np.array([most], np.int32))
        found: list[int] = drafts.tokens[0, : drafts.counts[0]].tolist()
        return found


@dataclass
class Naive:
    """The same drafts by brute force. An answer is its tokens after the last `depth` of its prompt, and where it begins among them."""

    config: SpeculativeConfig
    rows: dict[int, tuple[bytes, int, list[int]]] = field(default_factory=dict)
    past: list[tuple[bytes, list[int], int]] = field(default_factory=list)

    def remove(self, row: int) -> None:
        group, first, tokens = self.rows.pop(row)
        begin = max(0, first - self.config.suffix_decoding_max_tree_depth)
        if first < len(tokens):
            self.past.append((group, tokens[begin:], first - begin))
        self.past = self.past[max(0, len(self.past) - self.config.suffix_decoding_max_cached_requests) :]

    def draft(self, row: int, most: int) -> list[int]:
        group, _, known = self.rows[row]
        own = self._walk(known, [(known, 0)], most, latest_first=True)
        others = self._walk(known, [(text, first) for whose, text, first in self.past if whose == group], most)
        return (others if others[1] > own[1] else own)[0]

    def _walk(
        self, known: list[int], texts: list[tuple[list[int], int]], most: int, latest_first: bool = False
    ) -> tuple[list[int], float]:
        for length in range(min(len(known), self.config.suffix_decoding_max_tree_depth), 0, -1):
            pattern = known[len(known) - length :]
            found = []
            for text, first in reversed(texts):
                ends = [end for end in range(max(first, length), len(text)) if text[end - length : end] == pattern]
                found += [text[end:] for end in (ends[::-1] if latest_first else ends)]
            if found:
                break
        else:
            return [], 0.0
        draft: list[int] = []
        prob = score = 0.0
        while len(draft) < min(most, int(length * self.config.suffix_decoding_max_spec_factor + 1e-6)):
            going_on = [text for text in found if text[: len(draft)] == draft and len(text) > len(draft)]
            if not going_on:
                break
            counts = Counter(text[len(draft)] for text in going_on)
            token = max(counts, key=lambda one: counts[one])
            prob = (prob if draft else 1.0) * (counts[token] / len(going_on))
            if prob < self.config.suffix_decoding_min_token_prob:
                break
            draft.append(token)
            score += prob
        return draft, score


TOKENS = st.lists(st.sampled_from([0, 1, 2, LAST]), max_size=8)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["answer", "answer", "add", "sample", "remove", "preempt"]),
        st.integers(0, ROWS - 2),
        *(TOKENS, TOKENS),
        st.sampled_from([b"", b"a"]),
    ),
    min_size=3,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    CHANGES,
    st.integers(0, 6),
    st.builds(
        SpeculativeConfig,
        suffix_decoding_max_tree_depth=st.integers(1, 6),
        suffix_decoding_max_cached_requests=st.sampled_from([0, 1, 3, 10]),
        suffix_decoding_max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        suffix_decoding_min_token_prob=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
    ),
)
def test_drafts_are_what_a_look_at_all_positions_gives(
    changes: list[tuple[str, int, list[int], list[int], bytes]], most: int, config: SpeculativeConfig
) -> None:
    server, naive = Server(config), Naive(config)
    for what, row, tokens, more, group in changes:
        if what == "answer":
            server.answer(tokens, more, group)
            naive.rows[ROWS - 1] = (group, len(tokens), tokens + more)
            naive.remove(ROWS - 1)
        elif row not in naive.rows:
            server.add(row, tokens, group)
            naive.rows[row] = (group, len(tokens), list(tokens))
        elif what in ("add", "sample"):
            server.sample(row, tokens)
            naive.rows[row][2].extend(tokens)
        else:
            whose, _, known = naive.rows[row]
            server.remove(row)
            naive.remove(row)
            if what == "preempt":  # it comes again with all its tokens
                server.add(row, known, whose)
                naive.rows[row] = (whose, len(known), known)
        for held in naive.rows:
            assert server.draft(held, most, steps=2) == naive.draft(held, most)  # all answers are learned


def test_a_past_answer_is_drafted_and_the_row_itself_where_it_knows_as_much() -> None:
    server = Server()
    server.answer([1, 2, 3], [10, 11, 12, 13, 14])
    server.add(0, [1, 2, 3])
    assert server.draft(0) == [10, 11, 12]  # as many as were matched
    server.sample(0, [10, 11])
    assert server.draft(0) == [12, 13, 14]
    server.add(1, [3, 10, 7, 7, 3, 10])
    assert server.draft(1) == [7, 7]
    assert server.draft(1, most=1) == [7]
    assert server.draft(1, most=0) == []


def test_the_likeliest_token_is_drafted_until_it_is_too_unlikely() -> None:
    config = msgspec.structs.replace(CONFIG, suffix_decoding_min_token_prob=0.4, suffix_decoding_max_spec_factor=9.0)
    server = Server(config)
    for answer in ([5, 2, 6], [5, 2, 7], [5, 3, 8], [4]):
        server.answer([1], answer)
    server.add(0, [1])
    assert server.draft(0) == [5, 2]  # 3 of 4, then 2 of these 3, then one of these 2: a quarter of all


def test_the_oldest_answers_leave() -> None:
    server = Server(msgspec.structs.replace(CONFIG, suffix_decoding_max_cached_requests=2))
    for nth in range(3):
        server.answer([nth], [10 + nth] * 5)
    server.add(0, [0])
    drafts = []
    for token in range(3):
        server.tokens[0, 0] = token
        drafts.append(server.draft(0, steps=3))
    assert drafts == [[], [11], [12]]


def test_tokens_of_all_answers_are_bounded() -> None:
    with patch.object(suffix, "MAX_TOKENS", 3 * (30 + 25)):  # 24 of a prompt
        server = Server()
        for nth in range(20):
            server.answer([1000 + nth], list(range(30 * nth, 30 * nth + 30)))
            server.add(0, [1])
            server.draft(0, steps=10)
            server.remove(0)
        server.add(0, [1])
        found = []
        for nth in range(20):
            server.tokens[0, 0] = 1000 + nth
            found.append(bool(server.draft(0)))
        assert found == [False] * 17 + [True] * 3
        server.answer([5000], [7] * 200)  # more than all may have
        server.tokens[0, 0] = 5000
        assert server.draft(0, steps=50) == []


def test_a_depth_that_no_row_has_takes_no_more_than_a_row() -> None:
    server = Server(msgspec.structs.replace(CONFIG, suffix_decoding_max_tree_depth=2**30))
    server.answer([1, 2, 3], [4, 5, 6])
    server.add(0, [9, 2, 3, 4])
    assert server.draft(0) == [5, 6]


@pytest.mark.parametrize("waiting", [2, 1024])
def test_answers_that_find_too_many_waiting_are_not_learned(waiting: int) -> None:
    with patch.object(suffix, "MAX_WAITING", waiting):
        server = Server()
        for nth in range(3):
            server.answer([nth], [10 + nth])
        server.add(0, [2])
        assert server.draft(0, steps=3) == ([12] if waiting > 2 else [])


def test_a_long_answer_is_learned_in_many_steps() -> None:
    server = Server()
    server.answer([1], list(range(100, 400)))
    server.add(0, [100])
    assert server.draft(0) == [101]
    server.tokens[0, 0] = 398
    assert server.draft(0, steps=3) == []
    assert server.draft(0) == [399]


def test_a_group_whose_answers_have_left_takes_no_memory() -> None:
    server = Server(msgspec.structs.replace(CONFIG, suffix_decoding_max_cached_requests=2))
    used = []
    tracemalloc.start()
    try:
        for nth in range(300):
            server.answer([1], list(range(20)), group=nth.to_bytes(2))
            server.add(0, [1])
            server.draft(0, steps=5)
            server.remove(0)
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert used[299] - used[100] < 50 * 200  # far less than the tokens of 200 answers


def test_groups_are_apart_and_a_session_begins_with_nothing() -> None:
    server = Server()
    server.answer([1, 2], [3, 4], group=b"a")
    server.add(0, [1, 2], group=b"a")
    server.add(1, [1, 2], group=b"b")
    assert (server.draft(1), server.draft(0)) == ([], [3, 4])
    server.drafter.reset()
    server.add(0, [1, 2], group=b"a")
    assert server.draft(0) == []


def test_a_batch_has_the_drafts_of_its_rows() -> None:
    server = Server()
    server.add(0, [1, 2, 1])
    server.add(1, [])
    server.add(2, [5, 6, 7, 5, 6])
    rows, most = np.array([2, 0, 1], np.int32), np.array([1, 4, 9], np.int32)
    drafts = server.drafter.propose(rows, server.lens[rows], most)
    assert drafts.counts.tolist() == [1, 1, 0]
    assert drafts.tokens[:2, 0].tolist() == [7, 2]
    none = server.drafter.propose(rows[:0], server.lens[rows[:0]], most[:0])
    assert none.tokens.shape == (0, 0)
