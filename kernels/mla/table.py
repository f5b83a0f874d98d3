"""Makes this GPU's table of latent attention's tiles from what tuning/measure_tables.py has timed; see tiles.decode_tile."""

from typing import Any

from meshlm.kernels.attention.table import Times, best
from meshlm.kernels.mla.tiles import MOST_HEADS, PrefillTile, splits_of

LONE = 16  # splits from which on a decode is bound by how long one program takes


def decode_entries(heads: int, times: Times, multiprocessors: int) -> list[dict[str, Any]]:
    """The entries for lone requests, and for the others."""
    block_h = min(MOST_HEADS, heads)
    alone = [case for case in times if splits_of(case[0] * -(-heads // block_h), multiprocessors) >= LONE]
    entries = []
    for cases in (alone, [case for case in times if case not in alone]):
        (per, (block_n, warps, stages, of_lines)), _ = best(times, cases)
        where = {"splits_from": LONE} if cases is alone else {}
        entry = {"block_n": block_n, "warps": warps, "stages": stages, "of_lines": of_lines}
        entries.append({"heads_to": block_h, **where, "programs_per_multiprocessor": per, **entry})
    return entries


def table(times: dict[str, Times], multiprocessors: int) -> dict[str, Any]:
    """The whole table, by the times of each record."""
    decodes: list[dict[str, Any]] = []
    for heads in sorted({case[2] for case in times["decode"]}):
        of_heads = {case: found for case, found in times["decode"].items() if case[2] == heads}
        decodes += decode_entries(heads, of_heads, multiprocessors)
    prompts = {
        name: best(times[record], times[record])[0]
        for name, record in (("prefill", "absorbed"), ("dense", "projected"))
    }
    return {"decode": decodes, **{name: PrefillTile(*tile)._asdict() for name, tile in prompts.items()}}
