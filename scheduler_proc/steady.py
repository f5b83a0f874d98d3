"""Decodes among which nothing happens but the next token: planned and taken in as columns, whatever their number. Pure.

Made by batching.py when two plans in a row hold the same decodes and nothing else. After the sleep between two steps nothing is in
the caches any more: a loop over hundreds of requests waits for the memory of each (3 µs a request and step), a column is a few
lines. numpy would be worse than either: each of its functions is code that has to be fetched too.

While it stands, the requests' own counts lag behind, and `settle` brings them up to date: before anything else looks at them (any event
but a result, a worker's counts, or a Tick at which nothing ends). It never ends, preempts or starts a request: it declines, and the
general way does it.
"""

from array import array
from typing import NamedTuple

from meshlm.protocol.columns import Counters, pack_i32, unpack_i32
from meshlm.protocol.ids import Identity, StepId
from meshlm.protocol.step_edge import StepPlan
from meshlm.scheduler_proc.blocks import BlockPool
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.plan import Inflight
from meshlm.scheduler_proc.request import Request

FEWEST = 16  # with fewer requests the loops are as fast


class Rows(NamedTuple):
    """One detokenizer's part of each result."""

    detokenizer: Identity
    places: list[int]
    handles: bytes
    next_index: Counters


class Steady:
    """Requests in batch order, with the columns of their next step and of their next result."""

    def __init__(self, requests: list[Request], last_starts: "array[int]", block_size: int) -> None:
        """`last_starts`: of the plan that was just made of them, whose results are all still to come."""
        self.requests = requests
        self.num_planned = self.num_taken = 0  # steps
        self._block_size = block_size
        starts = [start + 1 for start in last_starts]
        self._starts = Counters(starts)
        self._rows = pack_i32(request.row for request in requests)
        self._growing: dict[int, list[int]] = {}  # step -> the places that need a block for it
        for place, (request, start) in enumerate(zip(requests, starts, strict=True)):
            self._growing.setdefault(request.capacity - start, []).append(place)
        # Until the first of them has all its tokens on the way.
        self.num_steps = min(request.max_len - start for request, start in zip(requests, starts, strict=True)) - 1
        self._stop_ids = frozenset[int]().union(*(request.stop_ids for request in requests))
        self._columns: list[memoryview[int]] = []  # tokens of the results, in order, less the first ones
        self._num_forgotten = 0  # ... so many, which all requests have
        self.num_told = [0] * len(requests)  # of those, how many each request has already
        self._num_asked = 0  # results at the last `filled`
        # num_taken, modulo block_size -> the places whose newest token is then the first of a block.
        self._begin_block: dict[int, list[int]] = {}
        for place, start in enumerate(starts):
            self._begin_block.setdefault(-start % block_size, []).append(place)
        self._parts = _by_detokenizer(requests, starts)

    def plan(self, pool: BlockPool, session: int, step: StepId, now_ns: int) -> tuple[StepPlan, Inflight] | None:
        """The next step of them all; None when one has no token left to get, or there are not enough blocks."""
        growing = self._growing.get(self.num_planned)
        if self.num_planned >= self.num_steps or (growing and len(growing) > pool.num_free):
            return None
        block_rows, block_ids = self._grow(pool, growing) if growing else (b"", b"")
        count = len(self.requests)
        forgotten, remembered, hashes = pool.take_changes()
        plan = StepPlan(
            session=session,
            step=step,
            rows=self._rows,
            starts=self._starts.column(),
            counts=b"",
            samples=b"",
            num_tokens=count,
            block_rows=block_rows,
            block_ids=block_ids,
            planned_ns=now_ns,
            forgotten=forgotten,
            remembered=remembered,
            hashes=hashes,
        )
        self._starts.advance()
        self.num_planned += 1
        return plan, Inflight(step, self.requests, b"", count, count, now_ns)

    def _grow(self, pool: BlockPool, places: list[int]) -> tuple[bytes, bytes]:
        """A block for each of these requests; the plan's columns of them."""
        blocks = pool.allocate(len(places))
        for place, block in zip(places, blocks, strict=True):
            request = self.requests[place]
            request.blocks.append(block)
            request.capacity += self._block_size
        del self._growing[self.num_planned]
        self._growing[self.num_planned + self._block_size] = places
        return pack_i32(self.requests[place].row for place in places), pack_i32(blocks)

    def take(self, token_ids: bytes, output: Output) -> bool:
        """The tokens of the next of these steps; False when they may end a request, and the general way must take them."""
        tokens = unpack_i32(token_ids)
        if self.num_taken + 1 >= self.num_steps or len(tokens) != len(self.requests):
            return False
        if self._stop_ids and not self._stop_ids.isdisjoint(tokens):
            return False
        whole = len(self._parts) == 1
        for part in self._parts:
            mine = token_ids if whole else pack_i32([tokens[place] for place in part.places])
            output.of(part.detokenizer).columns(part.handles, part.next_index.column(), mine)
            part.next_index.advance()
        self._columns.append(tokens)
        self.num_taken += 1
        return True

    def filled(self) -> list[Request]:
        """The requests that got the first token behind a full block since this was asked last; they know their tokens now."""
        since = max(
            self._num_asked, self.num_taken - self._block_size
        )  # in so many results each place has its turn once
        self._num_asked = self.num_taken
        found = []
        for num_taken in range(since + 1, self.num_taken + 1):
            for place in self._begin_block.get(num_taken % self._block_size, ()):
                self._tell(place)
                found.append(self.requests[place])
        return found

    def _tell(self, place: int) -> None:
        request, told = self.requests[place], self.num_told[place]
        request.tokens.extend([column[place] for column in self._columns[told - self._num_forgotten :]])
        request.num_inflight -= self.num_taken - told
        self.num_told[place] = self.num_taken

    def catch_up(self) -> None:
        """Tell the requests their tokens, and go on."""
        for place in range(len(self.requests)):
            self._tell(place)
        self._columns.clear()
        self._num_forgotten = self.num_taken

    def settle(self) -> None:
        """Tell the requests what happened to them. Call once, and drop this."""
        for place, request in enumerate(self.requests):
            self._tell(place)
            request.num_computed += self.num_planned
            request.num_inflight += self.num_planned

    def check(self) -> None:
        """AssertionError when the columns contradict the requests."""
        assert len(self._columns) + self._num_forgotten == self.num_taken
        starts, rows = unpack_i32(self._starts.column()), unpack_i32(self._rows)
        growing = {place: step for step, places in self._growing.items() for place in places}
        for place, request in enumerate(self.requests):
            assert starts[place] == request.num_computed + self.num_planned
            assert rows[place] == request.row
            assert growing[place] - self.num_planned == request.capacity - starts[place] >= 0
        for part in self._parts:
            for place, index in zip(part.places, unpack_i32(part.next_index.column()), strict=True):
                request = self.requests[place]
                expected = request.num_prompt + index - self.num_taken + self.num_told[place]
                assert len(request.tokens) == expected if self.num_taken else len(request.tokens) <= expected


def _by_detokenizer(requests: list[Request], starts: list[int]) -> list[Rows]:
    places: dict[Identity, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(request.detokenizer, []).append(place)
    parts = []
    for detokenizer, mine in places.items():
        handles = pack_i32(requests[place].handle for place in mine)
        indices = Counters(starts[place] + 1 - requests[place].num_prompt for place in mine)
        parts.append(Rows(detokenizer, mine, handles, indices))
    return parts
