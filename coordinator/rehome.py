"""Chooses the requests that should leave their rank. Pure; asked by moves.py.

`plan`: those that wait behind a full one while another is free. `rescue`: those of a rank that has lost its workers, as far as
others have room. They only say which; where these go is decided when their detokenizer admits them again.
"""

from bisect import insort
from collections.abc import Iterable
from heapq import heapify, heapreplace

from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.roles import SPILL, RankRole
from meshlm.coordinator.routing import PREFILL_WEIGHT
from meshlm.protocol.wire.ids import Identity, RequestId

MOST_AT_ONCE = 256  # from one rank


def plan(ranks: Iterable[Rank]) -> dict[Identity, list[RequestId]]:
    """Requests to ask back, newest first: those that came first start soonest where they are."""
    open_ones = sorted((rank for rank in ranks if rank.open), key=lambda rank: -rank.score)
    found: dict[Identity, list[RequestId]] = {}
    for leg in RankRole:
        free = [room for rank in open_ones if (room := _free_for(rank, leg)) is not None]
        if not free:
            continue
        heapify(free)
        for rank in open_ones:
            num_waiting = min(rank.load.num_waiting if rank.load is not None else 0, MOST_AT_ONCE)
            num_left = num_waiting - len(found.get(rank.identity, ()))
            if num_left > 0 and (leaving := _leaving(rank, num_left, free, leg)):
                found.setdefault(rank.identity, []).extend(leaving)
    return found


def rescue(stranded: Iterable[Rank], ranks: Iterable[Rank]) -> dict[Identity, list[RequestId]]:
    """Requests to ask back of ranks without workers, in the order of dispatch. Those with no room elsewhere wait for the workers:
    behind a full rank they might wait longer, and would make others wait."""
    open_ones = [rank for rank in ranks if rank.open]
    # What comes from a rank without workers has lost its KV: it goes to a rank for prompts, if one is there.
    takers = [rank for rank in open_ones if rank.role is not RankRole.DECODE] or open_ones
    rooms = sorted(rank.room for rank in takers if rank.room > 0)
    found: dict[Identity, list[RequestId]] = {}
    for rank in stranded:
        if not rooms or rank.load is None or not rank.requests:
            continue
        generated = rank.load.live_tokens // len(rank.requests)  # nobody says whose they are
        for request_id, entry in rank.requests.items():
            tokens = entry.given + generated
            if entry.pinned or tokens > rooms[-1]:
                continue
            found.setdefault(rank.identity, []).append(request_id)
            insort(rooms, rooms.pop() - tokens)
    return found


def _free_for(rank: Rank, leg: RankRole) -> "_Free | None":
    """What a rank without a queue would take of the requests at this leg; None: nothing. As the router, which places them, has it: an
    idle rank takes prompts where others decode."""
    if rank.num_unstarted or rank.load is None or rank.load.num_waiting:
        return None
    if rank.role is leg:
        return _Free(rank, rank.score)
    spills = leg is RankRole.PREFILL and rank.role is RankRole.DECODE and rank.idle
    return _Free(rank, rank.score + SPILL) if spills else None


class _Free:
    """A rank without a queue, and what it would have to do with the requests that are meant for it so far."""

    __slots__ = ("score", "tokens")

    def __init__(self, rank: Rank, score: float) -> None:
        assert rank.load is not None
        self.score, self.tokens = score, rank.load.num_free_blocks * rank.load.block_size

    def __lt__(self, other: "_Free") -> bool:
        return self.score < other.score


def _leaving(rank: Rank, num_waiting: int, free: list[_Free], leg: RankRole) -> list[RequestId]:
    """Requests at this leg that would start sooner elsewhere. One whose KV is being loaded stays: another rank would load it again."""
    leaving: list[RequestId] = []
    score = rank.score
    for request_id, entry in reversed(rank.requests.items()):
        if len(leaving) >= num_waiting:
            break
        if not entry.waiting or entry.pinned or entry.loaded or entry.leg is not leg:
            continue
        there = free[0]
        tokens = entry.prefill + entry.cached
        cost = PREFILL_WEIGHT * tokens + entry.output
        if there.score + cost >= score or there.tokens < tokens:
            break
        leaving.append(request_id)
        score -= PREFILL_WEIGHT * entry.prefill + entry.output
        there.score, there.tokens = there.score + cost, there.tokens - tokens
        heapreplace(free, there)
    return leaving
