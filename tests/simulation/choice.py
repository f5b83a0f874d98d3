"""Which of many seeds a run plays: all that bring faults together for the first time, and some of the others."""

from collections.abc import Sequence
from itertools import combinations

from faults import Fault
from scenario import make

OTHERS = 6  # of the seeds whose faults have stood together in earlier ones, one of so many is played


def chosen(seeds: Sequence[int]) -> list[int]:
    """All faults of all roles in all shapes of a mesh that the seeds have, and any two of them in their order, are among these."""
    seen: set[object] = set()
    found, num_others = [], 0
    for seed in seeds:
        scenario = make(seed)
        faults = [_kind(fault) for fault in sorted(scenario.faults, key=lambda fault: fault.at_frame)]
        told = {(scenario.shape, *some) for count in (0, 1, 2) for some in combinations(faults, count)}
        if told <= seen:
            num_others += 1
            if num_others % OTHERS:
                continue
        seen |= told
        found.append(seed)
    return found


def _kind(fault: Fault) -> object:
    return fault.kind, fault.who.role, fault.peer and fault.peer.role
