"""Chooses the rank for a request: the ledger of each rank's load, and the policies.

Pure; owned by core.py. The ledger is event-sourced: dispatch, first token and end of a request adjust it at once; a rank's own
Load only corrects it. A rank's score is the work that is ahead of it, in decode tokens; a request goes where the score plus the
prompt tokens that it would have to compute there is least. Of equal ranks it is the one that was not chosen for longest: where
one request comes after the other, all caches fill. Candidates are kept sorted, so that a choice does not look at all.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from meshlm.coordinator.ledger import Entry, Rank
from meshlm.coordinator.prefix_index import MAX_CHUNKS, Chain, Found, PrefixIndex, chain_of
from meshlm.protocol.edges.admit import EngineRequest, Load, SchedulerIncarnation, Started
from meshlm.protocol.wire.ids import Identity, Incarnation, RequestId

Policy = Literal["cache-aware", "least-loaded", "round-robin"]
Over = dict[Identity, Incarnation]  # schedulers whose incarnations up to this one have ended

PREFILL_WEIGHT = 0.5  # a prompt token to compute, in outstanding decode tokens
MISS_WEIGHT = 1.0  # the same of the request itself: it waits for them, and they take time from all others
FEW = 16  # ranks with a prefix that are looked at one by one
MOST_LOOKED_AT = 64  # ranks in the order of their score that are looked at for one request
DEFAULT_OUTPUT = 256.0  # tokens that a request is taken to give before any has ended
SMOOTHING = 0.02


class Choice(Struct, frozen=True):
    """A rank, and what its prefix cache saves there."""

    rank: Rank
    chain: Chain
    found: Found
    cached: int  # prompt tokens


class Router:
    """All ranks that the coordinator knows, and their loads."""

    def __init__(self, policy: Policy, prefix_caching: bool, places: int = sys.maxsize) -> None:
        """`places`: requests that run at a time in a rank."""
        self.policy, self.places = policy, places
        self.ranks: dict[Identity, Rank] = {}
        self.index = PrefixIndex() if policy == "cache-aware" and prefix_caching else None
        self.mean_output = DEFAULT_OUTPUT
        self.num_waiting = 0  # by the ranks' own word ...
        self.num_fresh = 0  # ... and what was dispatched since
        self.changes = 0  # counts when other ranks take requests than before
        self._order: list[tuple[float, int, int]] = []  # (score, used, number) of those that take requests
        self._by_number: dict[int, Rank] = {}
        self._clock = 0  # counts dispatches
        self._last = -1  # round-robin: whose turn it was
        self._turns: list[int] = []  # numbers of those that take requests ...
        self._turns_at = -1  # ... after so many changes

    # --- ranks come and go ---

    def add(self, rank: Rank) -> None:
        self.ranks[rank.identity] = self._by_number[rank.number] = rank

    def remove(self, identity: Identity) -> Rank:
        rank = self.ranks.pop(identity)
        self._out_of_order(rank)
        self.changes += 1
        self.num_waiting -= rank.load.num_waiting if rank.load is not None else 0
        self.num_fresh -= rank.num_fresh
        del self._by_number[rank.number]
        if self.index is not None:
            self.index.forget(rank.number)
        return rank

    def retire(self, rank: Rank, retiring: bool) -> None:
        """Give it no new requests, or again some."""
        rank.retiring = retiring
        self._reorder(rank)

    @property
    def num_open(self) -> int:
        return len(self._order)

    # --- choosing ---

    def choose(
        self, work: EngineRequest, wanted: int = -1, lost: Iterable[SchedulerIncarnation] = (), again: bool = False
    ) -> Choice | None:
        """The rank for a request: the wanted one, or the policy's; none of those incarnations that are `lost`, or that came before
        them. None when none may have it.

        `again`: it is taken from a rank for the sake of balance, which round-robin would not give.
        """
        over: Over = {one.scheduler: one.incarnation for one in lost}
        if self.policy == "round-robin" and wanted == -1 and not again:
            rank = self._next(over)
            return None if rank is None else Choice(rank, [], [], 0)
        chain: Chain = []
        found: Found = []
        if self.index is not None and work.reads_prefix_cache:
            chain = chain_of(work.prompt_token_ids, work.cache_salt, work.extras)
            found = self.index.find(chain)
        if wanted != -1:
            rank = self._by_number.get(wanted)
            if rank is None or not rank.open or _is_over(rank, over):
                return None
        else:
            rank = self._best(found, over)
            if rank is None:
                return None
        return Choice(rank, chain, found, _cached(found, rank.number))

    def _next(self, over: Over) -> Rank | None:
        if self._turns_at != self.changes:
            self._turns, self._turns_at = sorted(number for _, _, number in self._order), self.changes
        at, count = bisect_left(self._turns, self._last + 1), len(self._turns)
        for number in (self._turns[(at + step) % count] for step in range(count)):
            if not _is_over(self._by_number[number], over):
                self._last = number
                return self._by_number[number]
        return None

    def _best(self, found: Found, over: Over) -> Rank | None:
        """Least score plus prefill. First those that know much, if few; then by score, until none further can be better."""
        best: Rank | None = None
        least = float("inf")
        most = 0  # that a rank may know which is not looked at one by one
        for cached, mask in found:
            if mask.bit_count() > FEW:
                most = max(most, cached)
                continue
            while mask:
                rank = self._by_number[mask.bit_length() - 1]
                mask ^= 1 << rank.number
                cost = rank.score - MISS_WEIGHT * cached
                if rank.open and (cost, rank.used) < (least, best.used if best else 0) and not _is_over(rank, over):
                    best, least = rank, cost
        for looked_at, (score, _, number) in enumerate(self._order):
            if score - MISS_WEIGHT * most >= least or looked_at >= MOST_LOOKED_AT:
                break
            cost = score - MISS_WEIGHT * (_cached(found, number) if most else 0)
            if cost < least and not _is_over(self._by_number[number], over):
                best, least = self._by_number[number], cost
        return best

    # --- the ledger ---

    def dispatch(self, choice: Choice, work: EngineRequest, incarnation: Incarnation, pinned: bool) -> None:
        rank, index = choice.rank, self.index
        self._clock += 1
        last_use = 0
        if index is not None and choice.chain:
            last_use = index.last_use(rank.number, choice.chain, choice.cached)
            index.add(rank.number, choice.chain, self._clock, rank.kv_tokens, MAX_CHUNKS // len(self.ranks))
        given = (len(work.prompt_token_ids) + len(work.output_token_ids)) // 4
        prefill = given - choice.cached
        entry = Entry(prefill, self._output(work), choice.cached, last_use, pinned, work.attempt, incarnation, given)
        rank.add(work.request_id, entry)
        self.num_fresh += 1
        self._reorder(rank, used=self._clock)

    def _output(self, work: EngineRequest) -> int:
        """Output tokens to come: known where nothing but max_tokens ends it, else what is usual here."""
        sampling = work.sampling
        most = sampling.max_tokens - len(work.output_token_ids) // 4
        if not sampling.eos_token_ids and not sampling.stop_token_ids:
            return most
        return min(most, max(sampling.min_tokens, round(self.mean_output)))

    def drop(self, rank: Rank, request_id: RequestId) -> None:
        rank.remove(request_id)
        self._reorder(rank)

    def load(self, rank: Rank, load: Load) -> None:
        before, rank.load = rank.load, load
        self.num_fresh -= rank.num_fresh
        rank.num_fresh = 0
        if self.index is not None and before is not None and before.serving and not load.serving:
            self.index.forget(rank.number)  # its cache is gone with its workers
        self.num_waiting += load.num_waiting - (before.num_waiting if before is not None else 0)
        for started in load.started:
            self._started(rank, started)
        if load.ended and before is not None:
            mean = (load.generation_tokens - before.generation_tokens) / len(load.ended)
            self.mean_output += min(1.0, SMOOTHING * len(load.ended)) * (mean - self.mean_output)
        for request_id in load.ended:
            rank.remove(request_id)
        unknown = max(0, load.num_running + load.num_waiting - len(rank.requests))
        rank.unknown_tokens = unknown * round(self.mean_output)
        self._reorder(rank)

    def full(self, most: int) -> bool:
        """Whether at least so many requests wait in queues. Ranks report a moment late; a burst does not slip through meanwhile."""
        if self.num_waiting + self.num_fresh < most:
            return False
        return sum(rank.waiting(self.places) for rank in self.ranks.values()) >= most

    def _started(self, rank: Rank, started: Started) -> None:
        entry = rank.started(started.request_id)
        if entry is None or self.index is None or entry.cached - started.num_cached < 128:
            return
        # Its cache is least-recently-used: what was not used since is gone as well.
        self.index.forget(rank.number, entry.last_use + 1)

    # --- the order ---

    def _reorder(self, rank: Rank, used: int = 0) -> None:
        was_open = rank.in_order
        self._out_of_order(rank)
        rank.used = used or rank.used
        if rank.open:
            rank.score = rank.work(PREFILL_WEIGHT)
            insort(self._order, (rank.score, rank.used, rank.number))
            rank.in_order = True
        self.changes += was_open is not rank.in_order

    def _out_of_order(self, rank: Rank) -> None:
        if rank.in_order:
            del self._order[bisect_left(self._order, (rank.score, rank.used, rank.number))]
            rank.in_order = False

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        places = ((rank.score, rank.used, rank.number) for rank in self.ranks.values() if rank.open)
        assert self._order == sorted(places)
        loads = [rank.load for rank in self.ranks.values() if rank.load is not None]
        assert self.num_waiting == sum(load.num_waiting for load in loads)
        assert self.num_fresh == sum(rank.num_fresh for rank in self.ranks.values())
        assert {id(rank) for rank in self.ranks.values()} == {id(rank) for rank in self._by_number.values()}
        for rank in self.ranks.values():
            rank.check()
        if self.index is not None:
            self.index.check()


def _cached(found: Found, number: int) -> int:
    """Prompt tokens that this rank knows."""
    for cached, mask in found:
        if mask >> number & 1:
            return cached
    return 0


def _is_over(rank: Rank, over: Over) -> bool:
    """Whether a detokenizer saw this incarnation end; the coordinator may not have heard yet."""
    return bool(over) and rank.incarnation <= over.get(rank.identity, 0)
