"""Makes this GPU's table of attention's tiles from what tuning/measure_tables.py has timed.

A tile's cost is the geometric mean of how much slower it is than the best one of each case, so that no single shape decides.
"""

from collections.abc import Iterable
from math import exp, inf, log
from typing import Any

from meshlm.kernels import tables
from meshlm.kernels.attention.op import PER_MULTIPROCESSOR, PREFILL_ROWS
from meshlm.kernels.attention.tiles import MAX_SPLITS, SHORT_CONTEXT, splits_of
from meshlm.kernels.op import Case

Times = dict[Case, dict[Any, float]]  # microseconds of each candidate


def best(times: Times, cases: Iterable[Case]) -> tuple[Any, float]:
    """The candidate with the least cost over these cases, and that cost (1: the best everywhere)."""
    chosen = [times[case] for case in cases]
    candidates = set.intersection(*(set(found) for found in chosen))

    def cost(candidate: Any) -> float:
        return exp(sum(log(found[candidate] / min(found.values())) for found in chosen) / len(chosen))

    winner = min(sorted(candidates), key=cost)
    return winner, cost(winner)


def lone(case: Case) -> bool:
    """The case of one request with a short context and as many splits as there are."""
    n, context, (_, kv_heads, _), multiprocessors = case
    splits = splits_of(n * kv_heads, min(PER_MULTIPROCESSOR), multiprocessors)
    return bool(splits == MAX_SPLITS and context <= SHORT_CONTEXT)


def decode_table(times: Times) -> dict[str, Any]:
    """Makes the table of decodes from microseconds by (programs per multiprocessor, tile)."""
    found: list[tuple[float, float, list[dict[str, Any]]]] = []
    for per in sorted({key[0] for of_case in times.values() for key in of_case}):
        entries, costs = [], []
        for bucket in (True, False):
            cases = [case for case in times if lone(case) == bucket]
            if not cases:
                continue
            # The cost is against the best over all numbers of programs.
            own = {case: {key: us for key, us in times[case].items() if key[0] == per} for case in cases}
            (_, (block_n, warps, stages)), _ = best(own, cases)
            tile = (per, (block_n, warps, stages))
            costs += [log(times[case][tile] / min(times[case].values())) for case in cases]
            where = {"splits_from": MAX_SPLITS, "longest_to": SHORT_CONTEXT} if bucket else {}
            entries.append({**where, "block_n": block_n, "warps": warps, "stages": stages})
        found.append((sum(costs) / len(costs), per, entries))
    _, per, entries = min(found, key=lambda item: item[:2])
    return {"programs_per_multiprocessor": per, "decode": entries}


def prefill_table(times: Times) -> list[dict[str, Any]]:
    """From microseconds by (rows, tile); a case is (tokens x query heads, ...). Few rows up to the last case where they win."""
    works = sorted({case[0] for case in times})
    small = [work for work in works if best(times, [c for c in times if c[0] == work])[0][0] == PREFILL_ROWS[0]]
    edge = max(small, default=0)
    entries = []
    for rows, cases in zip(PREFILL_ROWS, ([c for c in times if c[0] <= edge], [c for c in times if c[0] > edge])):
        if not cases:
            continue
        own = {case: {key: us for key, us in times[case].items() if key[0] == rows} for case in cases}
        (_, (block_n, warps, stages)), _ = best(own, cases)
        where = {"work_to": edge} if rows == PREFILL_ROWS[0] and edge < works[-1] else {}
        entries.append({**where, "rows": rows, "block_n": block_n, "warps": warps, "stages": stages})
    return entries


def hopper_table(times: Times, on_hopper: dict[Case, float]) -> dict[str, dict[str, int]]:
    """By numbers of a head, from how many pairs x query heads on hopper.py is faster than the best of prefill.py's tiles."""

    def pairs(case: Case) -> int:
        work, _, tokens, _ = case
        return int(work * tokens // 2)

    found = {}
    for dim in {case[3][2] for case in on_hopper}:
        cases = {case: us for case, us in on_hopper.items() if case[3][2] == dim}
        lost = max((pairs(case) for case, us in cases.items() if us >= min(times[case].values())), default=0)
        won = [pairs(case) for case in cases if pairs(case) > lost]
        found.update({str(dim): min(won)} if won else {})
    return {"hopper_from": found}


def table(times: dict[str, Times], multiprocessors: int) -> dict[str, Any]:
    """The whole table, by the times of each record. What whole steps have chosen stays in front."""
    decodes = {(*case, multiprocessors): found for case, found in times["decode"].items()}
    prompts = {
        (n * tokens * heads[0], n, tokens, heads): found for (n, tokens, heads), found in times["prefill"].items()
    }
    on_hopper = {
        (n * tokens * heads[0], n, tokens, heads): found[()]
        for (n, tokens, heads), found in times["prefill_by_hopper"].items()
        if found[()] < inf
    }
    found = {**decode_table(decodes), "prefill": prefill_table(prompts), **hopper_table(prompts, on_hopper)}
    before = (tables.own("attention") or {"decode": []})["decode"]
    found["decode"] = [entry for entry in before if "group_to" in entry] + found["decode"]
    known = tables.read("attention")  # perhaps another GPU's, and its other heads count here too
    if tables.is_kin(known):
        found["hopper_from"] = {**known.get("hopper_from", {}), **found["hopper_from"]}
        found["hopper_windows"] = known.get("hopper_windows", {})
    return found
