"""The past answers of one group of requests: where the last tokens of a row stood in them, and what followed there.

It gives what a suffix tree over the answers gives (SuffixDecoding, arXiv 2411.04975), as a sorted list: each place, which is a token of
an answer, stands in the order of its context, the tokens before it read backwards. So the places that have the longest context in
common with a row are neighbours, and a continuation may be longer than a context. Called by suffix.py. No clock and no hash: the same
calls give the same lists in every process.

A token takes 12 bytes (4 itself, 8 its place), 17 with what lists keep free; an answer 4 * (depth + 1) more. Measured on one core
with 400,000 tokens of chats and depth 24: 4 us to insert a token, 3 to remove one, 6 for the longest match, 14 for what follows it.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from meshlm.workers.rows.changes import I32

BLOCK = 512  # places of one list, which has at most twice as many
MAX_PLACES = 64  # that are looked at: where there are more, as many from all over them
NONE = -1  # before the first token of a prompt, and behind the last of an answer


class PastAnswers:
    def __init__(self, depth: int) -> None:
        """depth: the most tokens of a context that are compared."""
        self._depth = depth
        # int32: each answer is NONE, its tokens from the last to the first, `depth` tokens of its prompt
        self._tokens = bytearray()
        self._base = 0  # bytes that were before these, and are gone
        # A place is where its context begins, in bytes from the very first on. The token itself is before it, the next one before that.
        self._blocks = [array("Q")]
        self._lowest = [b""]  # no context in a block is below this, none in the blocks before it above
        self._lens: deque[tuple[int, int]] = deque()  # tokens of each answer, and bytes that it takes

    def __len__(self) -> int:
        """Answers, of which the last may not be known as a whole."""
        return len(self._lens)

    def add(self, tokens: I32, first: int) -> Iterator[None]:
        """An answer, which begins at tokens[first]; what is before that is its prompt. Each step of the iterator inserts one place."""
        known = np.full(self._depth + 1 + len(tokens) - first, NONE, np.int32)
        used = tokens[max(0, first - self._depth) :]
        known[1 : 1 + len(used)] = used[::-1]
        begin, num_tokens = self._base + len(self._tokens), len(tokens) - first
        self._tokens += known.tobytes()
        self._lens.append((num_tokens, known.nbytes))
        for nth in range(num_tokens, 0, -1):
            self._insert(begin + 4 * (nth + 1))
            yield

    def remove_oldest(self) -> Iterator[None]:
        """The answer that was added first goes, a place at each step. All its places must be known."""
        num_tokens, num_bytes = self._lens.popleft()
        for nth in range(num_tokens, 0, -1):
            self._remove(self._base + 4 * (nth + 1))
            yield
        del self._tokens[:num_bytes]
        self._base += num_bytes

    def longest_match(self, context: bytes) -> int:
        """context: int32, the last tokens of a row, backwards, `depth` at the most. How many of its first ones stand somewhere."""
        nth, at = self._first_from(context)
        near = self._blocks[nth][max(0, at - 1) : at + 1]
        for block in (self._blocks[max(0, nth - 1)][-1:], *self._blocks[nth + 1 : nth + 2]):
            near.extend(block[:1])
        key, size, wanted = self._context(), len(context), int.from_bytes(context)
        differ = [(wanted ^ int.from_bytes(key(place)[:size])).bit_length() for place in near]
        return (size - -(-min(differ, default=8 * size) // 8)) // 4

    def continuations(self, context: bytes, limit: int) -> list[list[int]]:
        """The tokens that follow each place of this context, `limit` at most; the latest answers first, in each the first places."""
        (first, begin), (last, end) = self._first_from(context), self._first_from(context + b"\xff" * 4 * self._depth)
        blocks = [self._blocks[first][begin:], *self._blocks[first + 1 : last], self._blocks[last][:end]]
        if first == last:
            blocks = [self._blocks[first][begin:end]]
        blocks = [block for block in blocks if block]
        blocks = blocks[:: -(-len(blocks) // MAX_PLACES) or 1]
        step = -(-sum(map(len, blocks)) // MAX_PLACES)
        places = sorted(chain.from_iterable(block[::step] for block in blocks), reverse=True)
        tokens, end = memoryview(self._tokens).cast("i")[::-1], self._base + len(self._tokens)
        found = [tokens[(end - place) // 4 :][:limit].tolist() for place in places]
        return [one[: one.index(NONE)] if NONE in one else one for one in found]

    def _context(self) -> Callable[[int], bytes]:
        tokens, base, num_bytes = self._tokens, self._base, 4 * self._depth
        return lambda place: bytes(tokens[place - base : place - base + num_bytes])

    def _insert(self, place: int) -> None:
        """Behind those of the same context: they stand in the order in which they came."""
        key = self._context()
        context = key(place)
        nth = bisect_right(self._lowest, context) - 1
        block = self._blocks[nth]
        block.insert(bisect_right(block, context, key=key), place)
        if len(block) > 2 * BLOCK:
            self._blocks.insert(nth + 1, block[BLOCK:])
            self._lowest.insert(nth + 1, key(block[BLOCK]))
            del block[BLOCK:]

    def _remove(self, place: int) -> None:
        """It is the first of its context, as it came first."""
        nth, at = self._first_from(self._context()(place))
        block = self._blocks[nth]
        if at == len(block):
            nth, at, block = nth + 1, 0, self._blocks[nth + 1]
        assert block[at] == place, "places leave in the order in which they came"
        del block[at]
        if not block and nth:
            del self._blocks[nth], self._lowest[nth]

    def _first_from(self, context: bytes) -> tuple[int, int]:
        """Block and index there of the first place whose context is not below this one; the index may be the block's end."""
        nth = max(0, bisect_left(self._lowest, context) - 1)
        return nth, bisect_left(self._blocks[nth], context, key=self._context())
