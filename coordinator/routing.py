"""Chooses the rank for a request: the ledger of each rank's load, and the policies.

Pure; owned by core.py. The ledger is event-sourced: dispatch, first token and end of a request adjust it at once; a rank's own
Load only corrects it. A rank's score is the work that is ahead of it, in decode tokens; a request goes where the score plus the
prompt tokens that it would have to compute there is least. Of equal ranks it is the one that was not chosen for longest: where
one request comes after the other, all caches fill. Candidates are kept sorted, so that a choice does not look at all.
Where ranks have roles all this is so among those of the role that the request needs next (roles.py).
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from meshlm.coordinator.adapter_ranks import AdapterRanks
from meshlm.coordinator.ledger import Entry, Rank
from meshlm.coordinator.prefix_index import MAX_CHUNKS, Chain, Found, PrefixIndex, chain_of
from meshlm.coordinator.roles import SPILL, RankRole, can_be_handed_off, next_leg, role_of
from meshlm.protocol.edges.admit import EngineRequest, Load, SchedulerIncarnation, Started
from meshlm.protocol.extras import slot_key
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
    """A rank, and what its prefix cache saves there. In a mesh with roles also the leg that the request is at, another rank that has
    more of its KV, and whether the rank is to hand it off."""

    rank: Rank
    chain: Chain
    found: Found
    cached: int  # tokens
    leg: RankRole = RankRole.BOTH
    holder: Rank | None = None
    loaded: int = 0  # tokens that the holder has beyond those
    hands_off: bool = False


class Router:
    """All ranks that the coordinator knows, and their loads."""

    def __init__(self, policy: Policy, prefix_caching: bool, places: int = sys.maxsize, adapters_kept: int = 1) -> None:
        """`places`: requests that run at a time in a rank. adapters_kept: by the workers of each."""
        self.policy, self.places = policy, places
        self.ranks: dict[Identity, Rank] = {}
        self.index = PrefixIndex() if policy == "cache-aware" and prefix_caching else None
        self.adapters = AdapterRanks(adapters_kept)
        self.mean_output = DEFAULT_OUTPUT
        self.num_waiting = 0  # by the ranks' own word ...
        self.num_fresh = 0  # ... and what was dispatched since
        self.changes = 0  # counts when other ranks take requests than before
        self.num_prefill_ranks = 0  # the first ranks; 0: each does both
        # By role, (score, used, number) of the ranks that take requests.
        self._order: dict[RankRole, list[tuple[float, int, int]]] = {role: [] for role in RankRole}
        self._by_number: dict[int, Rank] = {}
        self._clock = 0  # counts dispatches
        self._last = dict.fromkeys(RankRole, -1)  # round-robin: whose turn it was
        self._turns: dict[RankRole, list[int]] = {}  # numbers of those that take requests ...
        self._turns_at = -1  # ... after so many changes

    # --- ranks come and go ---

    def add(self, rank: Rank) -> None:
        rank.role = role_of(rank.number, self.num_prefill_ranks)
        self.ranks[rank.identity] = self._by_number[rank.number] = rank

    def set_roles(self, num_prefill_ranks: int) -> None:
        """The first ranks are for prompts from now on. What they have already stays."""
        if num_prefill_ranks == self.num_prefill_ranks:
            return
        self.num_prefill_ranks = num_prefill_ranks
        for rank in self.ranks.values():
            self._out_of_order(rank)
            rank.role = role_of(rank.number, num_prefill_ranks)
            self._reorder(rank)
        self.changes += 1

    def remove(self, identity: Identity) -> Rank:
        rank = self.ranks.pop(identity)
        self._out_of_order(rank)
        self.changes += 1
        self.num_waiting -= rank.load.num_waiting if rank.load is not None else 0
        self.num_fresh -= rank.num_fresh
        del self._by_number[rank.number]
        self.adapters.forget(rank.number)
        if self.index is not None:
            self.index.forget(rank.number)
        return rank

    def retire(self, rank: Rank, retiring: bool) -> None:
        """Give it no new requests, or again some."""
        rank.retiring = retiring
        self._reorder(rank)

    def close(self, rank: Rank, closed: bool) -> None:
        """Give it no new requests until its weights have changed."""
        if rank.closed is not closed:
            rank.closed = closed
            self._reorder(rank)

    @property
    def num_open(self) -> int:
        return sum(map(len, self._order.values()))

    # --- choosing ---

    def choose(
        self,
        work: EngineRequest,
        wanted: int = -1,
        lost: Iterable[SchedulerIncarnation] = (),
        again: bool = False,
        handed_off: Rank | None = None,
        returns: bool = False,
    ) -> Choice | None:
        """The rank for a request: the wanted one, or the policy's; none of those incarnations that are `lost`, or that came before
        them. None when none may have it.

        `again`: it is taken from a rank for the sake of balance, which round-robin would not give. `handed_off`: by this rank.
        returns: it may have been at the wanted rank before, which takes it though it is closed."""
        over: Over = {one.scheduler: one.incarnation for one in lost}
        chain: Chain = []
        found: Found = []
        if self.index is not None and work.reads_prefix_cache:
            chain = chain_of(work.prompt_token_ids, work.cache_salt, work.extras)
            found = self.index.find(chain)
        has_kv = handed_off is not None and self.ranks.get(handed_off.identity) is handed_off and handed_off.serving
        holder = handed_off if has_kv else None
        leg = self._leg(work, found, holder)
        if wanted != -1:
            rank = self._by_number.get(wanted)
            is_open = rank is not None and (rank.open or (returns and rank.serving))
            if rank is None or not is_open or _is_over(rank, over):
                return None
        else:
            in_turn = self.policy == "round-robin" and not again
            adapter = slot_key(work.extras) if work.extras else b""
            known = self.adapters.preferred(found, adapter) if adapter and self.policy == "cache-aware" else found
            rank = self._place(_num_given(work), leg, over, None if in_turn else known)
            if rank is None:
                return None
        choice = Choice(rank, chain, found, _cached(found, rank.number), leg)
        return choice if leg is RankRole.BOTH else self._with_roles(choice, work, holder, is_pinned=wanted != -1)

    def _leg(self, work: EngineRequest, found: Found, holder: Rank | None) -> RankRole:
        if not self.num_prefill_ranks:
            return RankRole.BOTH
        if holder is not None:
            return RankRole.DECODE
        cached = next((tokens for tokens, mask in found if mask >> self.num_prefill_ranks), 0)
        return next_leg(work, _num_given(work) - cached)

    def _with_roles(self, choice: Choice, work: EngineRequest, holder: Rank | None, *, is_pinned: bool) -> Choice:
        """The choice with the rank that has more of the KV, and whether the request is handed off."""
        rank, cached, most = choice.rank, choice.cached, _num_given(work) - 1  # the newest token has no KV
        if holder is rank:
            cached, holder = most, None
        elif holder is None and choice.found and choice.found[0][0] > cached:
            most, mask = min(choice.found[0][0], most), choice.found[0][1]
            numbers = (number for number in range(mask.bit_length()) if mask >> number & 1)
            there = [
                one for one in map(self._by_number.__getitem__, numbers) if one.serving and one.weights == rank.weights
            ]
            holder = min(there, key=lambda one: (one.score, one.number), default=None)
        hands_off = (
            not is_pinned
            and choice.leg is RankRole.PREFILL is rank.role
            and bool(self._order[RankRole.DECODE])
            and can_be_handed_off(work)
        )
        loaded = max(0, most - cached) if holder is not None else 0
        return Choice(rank, choice.chain, choice.found, cached, choice.leg, holder, loaded, hands_off)

    def _place(self, num_tokens: int, leg: RankRole, over: Over, found: Found | None) -> Rank | None:
        """A rank for a request of so many tokens at this leg; without `found` by turns. One of the right role, unless none takes
        requests, or the request would wait there and a rank of the other role has nothing to do."""
        right = self._next(over, leg) if found is None else self._best(found, over, leg)
        if leg is RankRole.BOTH:
            return right
        if right is None:
            return self._best(found or [], over, leg.other)
        ranks = (self._by_number[number] for _, _, number in self._order[leg.other][:1])
        other = next((rank for rank in ranks if rank.idle and not _is_over(rank, over)), None)
        if other is None or not other.takes_at_once(num_tokens, self.places):
            return right
        if leg is RankRole.DECODE:
            spills = not right.takes_at_once(num_tokens, self.places)
        else:
            known = _cached(found or [], right.number) - _cached(found or [], other.number)
            spills = other.score + SPILL < right.score - MISS_WEIGHT * known
        return other if spills else right

    def _next(self, over: Over, role: RankRole) -> Rank | None:
        if self._turns_at != self.changes:
            self._turns = {role: sorted(number for _, _, number in order) for role, order in self._order.items()}
            self._turns_at = self.changes
        turns = self._turns[role]
        at, count = bisect_left(turns, self._last[role] + 1), len(turns)
        for number in (turns[(at + step) % count] for step in range(count)):
            if not _is_over(self._by_number[number], over):
                self._last[role] = number
                return self._by_number[number]
        return None

    def _best(self, found: Found, over: Over, role: RankRole) -> Rank | None:
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
                if not rank.open or rank.role is not role:
                    continue
                cost = rank.score - MISS_WEIGHT * cached
                if (cost, rank.used) < (least, best.used if best else 0) and not _is_over(rank, over):
                    best, least = rank, cost
        for looked_at, (score, _, number) in enumerate(self._order[role]):
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
        if work.extras and (adapter := slot_key(work.extras)):
            self.adapters.used(rank.number, adapter)
        last_use = 0
        if index is not None and choice.chain:
            last_use = index.last_use(rank.number, choice.chain, _cached(choice.found, rank.number))
            index.add(rank.number, choice.chain, self._clock, rank.kv_tokens, MAX_CHUNKS // len(self.ranks))
        given, whole = _num_given(work), self._output(work)
        output = 1 if choice.hands_off else whole
        prefill = given - choice.cached - choice.loaded
        of_whom = pinned, work.attempt, incarnation
        legs = choice.loaded, choice.leg, whole - output
        entry = Entry(prefill, output, choice.cached, last_use, *of_whom, given, *legs)
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
        has_changed = before is not None and before.weights is not None and before.weights != load.weights
        if before is not None and before.serving and (has_changed or not load.serving):
            self.adapters.forget(rank.number)
            if self.index is not None:
                self.index.forget(rank.number)  # its cache is gone with its workers, or of no use to other weights
        if rank.closed and load.serving is not (before is not None and before.serving):
            self.changes += 1  # requests that stay with its weights may go there
        self.num_waiting += load.num_waiting - (before.num_waiting if before is not None else 0)
        for started in load.started:
            self._started(rank, started)
        if load.ended and before is not None:
            num_left = sum(one.handed_off for one in load.returned)  # they had one token there
            mean = (load.generation_tokens - before.generation_tokens - num_left) / len(load.ended)
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
            insort(self._order[rank.role], (rank.score, rank.used, rank.number))
            rank.in_order = True
        self.changes += was_open is not rank.in_order

    def _out_of_order(self, rank: Rank) -> None:
        if rank.in_order:
            order = self._order[rank.role]
            del order[bisect_left(order, (rank.score, rank.used, rank.number))]
            rank.in_order = False

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for role, order in self._order.items():
            open_ones = (rank for rank in self.ranks.values() if rank.open and rank.role is role)
            assert order == sorted((rank.score, rank.used, rank.number) for rank in open_ones)
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


def _num_given(work: EngineRequest) -> int:
    return (len(work.prompt_token_ids) + len(work.output_token_ids)) // 4


def _is_over(rank: Rank, over: Over) -> bool:
    """Whether a detokenizer saw this incarnation end; the coordinator may not have heard yet."""
    return bool(over) and rank.incarnation <= over.get(rank.identity, 0)
