"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): a row's last tokens are looked for in the row itself and in past answers, and
the draft is what most often followed there.

The longest match counts, in the row and in the answers to its group each. From its places a draft goes along the likeliest next tokens:
the probability of each is (places where it follows) / (places where anything follows) times that of the token before it. The draft that
has the larger sum of probabilities (how many tokens are expected to be right) is taken; the row's own, where they are equal.

Measured on one core, depth 24: 20 us to draft from a row of 4,000 tokens, 45 us with 300,000 tokens of past answers (past_answers.py).
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.step import NewRow
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative.drafter import Drafts, no_drafts
from meshlm.workers.speculative.ngram import earlier_places
from meshlm.workers.speculative.past_answers import MAX_PLACES, PastAnswers

MAX_TOKENS = 1 << 22  # of all past answers, with the ends of their prompts: about 70 MB
MAX_WAITING = 1024  # answers that are to be learned or forgotten
CHANGES = 64  # tokens of past answers that a step inserts or removes at least, where some wait: 4 us each


def likeliest(continuations: list[list[int]], min_prob: float) -> tuple[list[int], float]:
    """The draft, and the sum of its tokens' probabilities. Of tokens that are equally likely, the one that comes first."""
    draft: list[int] = []
    prob, score = 1.0, 0.0
    while continuations := [one for one in continuations if len(one) > len(draft)]:
        nth = len(draft)
        if len(continuations) == 1:
            draft += continuations[0][nth:]
            return draft, score + prob * (len(draft) - nth)
        token, count = Counter(one[nth] for one in continuations).most_common(1)[0]
        prob *= count / len(continuations)
        if prob < min_prob:
            break
        draft.append(token)
        score += prob
        continuations = [one for one in continuations if one[nth] == token]
    return draft, score


class HeldRow(NamedTuple):
    group: bytes
    first: int  # its first token that is not learned yet: where its answer begins, or goes on after preemption


class SuffixDrafter:
    def __init__(self, tokens: I32, config: SpeculativeConfig) -> None:
        """tokens [rows, width]: of all rows. Answers to one group (NewRow.group) are never looked at for another."""
        self._tokens = tokens
        self._depth = min(config.suffix_decoding_max_tree_depth, tokens.shape[1])
        self._max_cached_requests = config.suffix_decoding_max_cached_requests
        self._max_spec_factor = config.suffix_decoding_max_spec_factor
        self._min_token_prob = config.suffix_decoding_min_token_prob
        self.reset()

    def reset(self) -> None:
        self._rows: dict[int, HeldRow] = {}
        self._answers: dict[bytes, PastAnswers] = {}
        # group of each answer and tokens that are kept of it, the oldest first
        self._cached: deque[tuple[bytes, int]] = deque()
        self._num_tokens = 0  # of all of them
        self._waiting: deque[Iterator[None]] = deque()  # changes of the answers, in their order

    def add_row(self, new: NewRow) -> None:
        self._rows[new.row] = HeldRow(new.group, len(new.token_ids) // 4)

    def remove_row(self, row: int, num_known: int) -> None:
        """The row's tokens are learned in the steps that follow; they are not, where too much waits for that."""
        group, first = self._rows.pop(row)
        if first >= num_known or not self._max_cached_requests or len(self._waiting) >= MAX_WAITING:
            return
        begin = max(0, first - self._depth)
        self._waiting.append(self._learn(group, self._tokens[row, begin:num_known].copy(), first - begin))
        self._cached.append((group, num_known - first + self._depth + 1))
        self._num_tokens += num_known - first + self._depth + 1
        while len(self._cached) > self._max_cached_requests or self._num_tokens > MAX_TOKENS:
            group, num_tokens = self._cached.popleft()
            self._waiting.append(self._forget(group))
            self._num_tokens -= num_tokens

    def computed(self, step: StepColumns, counts: I32, hidden: Tensor) -> None:
        """Changes the answers by as much as the step gave, or a bit more: each token is inserted once and removed once."""
        self._change_answers(CHANGES + 2 * int(counts.sum()))

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        drafts = no_drafts(most)
        for nth, (row, num_known, limit) in enumerate(zip(rows.tolist(), lens.tolist(), most.tolist(), strict=True)):
            if limit > 0 and (draft := self._draft(row, self._tokens[row, :num_known], limit)):
                drafts.tokens[nth, : len(draft)], drafts.counts[nth] = draft, len(draft)
        return drafts

    def _draft(self, row: int, known: I32, most: int) -> list[int]:
        length, places = earlier_places(known, self._depth)
        limit = self._limit(length, most)
        latest = places[: -MAX_PLACES - 1 : -1].tolist()
        draft, score = likeliest([known[at : at + limit].tolist() for at in latest], self._min_token_prob)
        if answers := self._answers.get(self._rows[row].group):
            context = known[-self._depth :][::-1].tobytes()
            length = answers.longest_match(context)
            if limit := self._limit(length, most):
                others = answers.continuations(context[: 4 * length], limit)
                other, other_score = likeliest(others, self._min_token_prob)
                return other if other_score > score else draft
        return draft

    def _limit(self, length: int, most: int) -> int:
        return min(most, int(length * self._max_spec_factor + 1e-6))

    def _learn(self, group: bytes, tokens: I32, first: int) -> Iterator[None]:
        yield from self._answers.setdefault(group, PastAnswers(self._depth)).add(tokens, first)

    def _forget(self, group: bytes) -> Iterator[None]:
        yield from self._answers[group].remove_oldest()
        if not self._answers[group]:
            del self._answers[group]

    def _change_answers(self, num_places: int) -> None:
        while self._waiting and num_places > 0:
            for _ in islice(self._waiting[0], num_places):
                num_places -= 1
            if num_places:
                self._waiting.popleft()
