"""How much encoders may do in a step: a budget of vectors, and what they have in their caches. Pure; owned by batching.py.

A step whose tokens need the first vector of an image has all of it encoded, so a few tokens of many images could make it as long as
one likes, and every stream beside it would wait. So a step ends before the item whose vectors would exceed the budget; one item alone
is always taken. Requests without items pass those that wait for the budget.

What is cached is an estimate, by the order of the plans: workers cache by the same rule (workers/media/vectors.py), and encode again
what they do not have.
"""

from collections import OrderedDict

from meshlm.scheduler_proc.request import Request


class EncoderBudget:
    def __init__(self, most: int, cached: int) -> None:
        """most: vectors that a step encodes, if they are of more than one item. cached: vectors that workers keep."""
        self._limit, self._capacity = most, cached
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # vectors by digest; used last, last
        self._num_cached = 0
        self._most = most  # of the step that is planned
        self.num_encoded = 0  # ... and what it encodes
        self._is_full = False

    def begin_plan(self) -> None:
        self._most, self.num_encoded, self._is_full = self._limit, 0, False

    def limit(self, num_tokens: int) -> None:
        """Others wait for the step that is planned: it encodes no more vectors than it may hold prompt tokens."""
        self._most = min(self._limit, num_tokens)

    def passed(self, request: Request) -> bool:
        """Whether this waiting request waits for the budget of a later step, and others may pass it."""
        return self._is_full and bool(request.encoder_inputs)

    def room(self, request: Request, start: int, count: int, *, chunked: bool = True) -> int:
        """As many of these tokens from `start` on as the step may compute. chunked: a prompt may be cut before an item."""
        encoded, seen = self.num_encoded, set[bytes]()
        for one in request.encoder_inputs:
            if one.end <= start or one.digest in self._cached or one.digest in seen:
                continue
            if one.first >= start + count:
                break
            if encoded and encoded + one.num_vectors > self._most and (chunked or self.num_encoded):
                self._is_full = True
                return max(0, one.position - start) if chunked else 0
            encoded += one.num_vectors
            seen.add(one.digest)
        return count

    def take(self, request: Request, start: int, count: int) -> None:
        """The step computes these tokens."""
        for one in request.encoder_inputs:
            if one.first >= start + count:
                break
            if one.end > start:
                self._use(one.digest, one.num_vectors)

    def _use(self, digest: bytes, num_vectors: int) -> None:
        if digest in self._cached:
            self._cached.move_to_end(digest)
            return
        self.num_encoded += num_vectors
        if num_vectors > self._capacity:
            return
        while self._num_cached + num_vectors > self._capacity:
            self._num_cached -= self._cached.popitem(last=False)[1]
        self._cached[digest] = num_vectors
        self._num_cached += num_vectors

    def clear(self) -> None:
        """The encoders may have other weights."""
        self._cached.clear()
        self._num_cached = 0

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self._num_cached == sum(self._cached.values()) <= self._capacity
