"""Chooses the expert that each slot of each rank holds, from the number of tokens that experts had. Pure; the same on every rank that
is given the same.

A rank has as many slots as every other; those of rank r are r * each to (r + 1) * each. With more slots than experts some experts have
replicas, which share their tokens: they go to those with the most tokens per replica (greedy replication; DeepSeek-AI 2025, "EPLB").
Then the heaviest replicas are dealt out first, each to the rank that has the least (longest processing time first, Graham 1969).
"""

import heapq
from collections.abc import Sequence


def first_placement(num_experts: int, num_redundant: int, num_ranks: int) -> list[int]:
    """The placement at the start: experts that follow one another, then copies of the first of these."""
    own, copies = num_experts // num_ranks, num_redundant // num_ranks
    return [
        rank * own + (slot if slot < own else (slot - own) % own)
        for rank in range(num_ranks)
        for slot in range(own + copies)
    ]


def rank_loads(load: Sequence[int], slots: Sequence[int], num_ranks: int) -> list[float]:
    """Tokens that each rank would compute, where replicas have equal parts of an expert's."""
    replicas = [0] * len(load)
    for expert in slots:
        replicas[expert] += 1
    each = len(slots) // num_ranks
    return [
        sum(load[expert] / replicas[expert] for expert in slots[rank * each : (rank + 1) * each])
        for rank in range(num_ranks)
    ]


def balancedness(loads: Sequence[float]) -> float:
    """The mean of the ranks over the largest: 1 is best."""
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


def balance(load: Sequence[int], slots: Sequence[int], first: Sequence[int], num_ranks: int) -> list[int]:
    """Moves experts from `slots`, which hold them now. load: tokens of each. The largest load of a rank is never above what it is
    with `slots` or with `first`, and experts stay where moving them does not make it smaller."""
    packed = _settled(slots, _packed(load, _replicas(load, len(slots), num_ranks), len(slots) // num_ranks, num_ranks))
    peaks = [max(rank_loads(load, given, num_ranks)) for given in (slots, packed, first)]
    return [list(slots), packed, list(first)][peaks.index(min(peaks))]


def _replicas(load: Sequence[int], num_slots: int, num_ranks: int) -> list[int]:
    """How many each expert has: no more than there are ranks."""
    found = [1] * len(load)
    heap = [(float(-tokens), expert) for expert, tokens in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load)):
        _, expert = heapq.heappop(heap)
        found[expert] += 1
        if found[expert] < num_ranks:
            heapq.heappush(heap, (-load[expert] / found[expert], expert))
    return found


def _packed(load: Sequence[int], replicas: Sequence[int], each: int, num_ranks: int) -> list[list[int]]:
    """The experts of each rank: one twice only where no other rank has a free slot."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for expert in sorted(range(len(load)), key=lambda expert: (-load[expert] / replicas[expert], expert)):
        for _ in range(replicas[expert]):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < each]
            rank = min(free, key=lambda rank: (expert in ranks[rank], sums[rank], rank))
            ranks[rank].append(expert)
            sums[rank] += load[expert] / replicas[expert]
    return ranks


def _settled(slots: Sequence[int], packed: list[list[int]]) -> list[int]:
    """The same ranks in an order, and slots of them, in which many experts stay where they are."""
    each = len(packed[0])
    held = [list(slots[begin : begin + each]) for begin in range(0, len(slots), each)]
    pairs = [(-_common(a, b), at, to) for at, a in enumerate(packed) for to, b in enumerate(held)]
    placed: dict[int, list[int]] = {}
    done: set[int] = set()
    for _, at, to in sorted(pairs):
        if at not in done and to not in placed:
            placed[to] = _in_slots(held[to], packed[at])
            done.add(at)
    return [expert for rank in range(len(packed)) for expert in placed[rank]]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(min(a.count(expert), b.count(expert)) for expert in set(a))


def _in_slots(held: list[int], experts: list[int]) -> list[int]:
    """Experts that the rank has stay in their slots, the others fill those that are left."""
    left = list(experts)
    found: list[int | None] = []
    for expert in held:
        stays = expert in left
        found.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in found]
