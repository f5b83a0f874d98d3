"""Which tiles latent attention is computed in on this GPU: tables/<gpu>.json, written by tuning/measure_tables.py."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from meshlm.kernels import pdl, tables
from meshlm.kernels.attention.tiles import one_of_each

MAX_SPLITS = 64
MOST_WAVES = 4  # of programs, one behind the other, where contexts are split
BEGIN = 0.03  # what a program costs beside its share of a context, in contexts
MOST_HEADS = 64  # of a program


class DecodeTile(NamedTuple):
    """The launch of a decode."""

    splits: int  # parts of each context
    block_n: int  # lines of a tile
    warps: int
    stages: int
    block_h: int = 16  # query heads of a program
    of_lines: bool = False  # kernel.py: latent_tile_of_lines


class PrefillTile(NamedTuple):
    """The tiles in which prompts are computed."""

    rows: int  # queries x heads of a tile
    block_n: int
    warps: int
    stages: int


@cache
def _table() -> dict[str, Any]:
    return tables.read("mla")


def decode_tile(requests: int, heads: int, device: torch.device) -> DecodeTile:
    """Enough parts of each context to fill the GPU, whatever the contexts are."""
    return decode_tile_of(_table(), requests, heads, pdl.multiprocessors(device))


def decode_tile_of(table: dict[str, Any], requests: int, heads: int, multiprocessors: int) -> DecodeTile:
    """The first entry for so many heads of a program and such splits."""
    block_h = min(MOST_HEADS, max(16, triton.next_power_of_2(heads)))
    programs = requests * -(-heads // block_h)
    for entry in table["decode"]:
        splits = splits_of(programs, int(entry["programs_per_multiprocessor"] * multiprocessors))
        if block_h <= entry["heads_to"] and splits >= entry.get("splits_from", 1):
            block_n, warps, stages = entry["block_n"], entry["warps"], entry["stages"]
            return DecodeTile(splits, block_n, warps, stages, block_h, entry["of_lines"])
    raise AssertionError("the last entry of a table fits all")


def splits_of(programs: int, slots: int) -> int:
    """How many parts keep `slots` programs at a time busy: many make equal shares of the GPU, few begin and end less often."""

    def cost(splits: int) -> float:
        return -(-programs * splits // slots) * (1 / splits + BEGIN)

    most = max(1, min(MAX_SPLITS, MOST_WAVES * slots // programs))
    return min(range(1, most + 1), key=cost)


def most_parts(heads: int, device: torch.device) -> int:
    """Requests x splits of any decode whose contexts are split."""
    groups = -(-heads // MOST_HEADS)
    per = max(entry["programs_per_multiprocessor"] for entry in _table()["decode"])
    return max(MAX_SPLITS, int(MOST_WAVES * per * pdl.multiprocessors(device)) // groups)


def warm_sizes(heads: int, most: int, device: torch.device) -> list[int]:
    """Numbers of requests whose decodes have all the tiles that any up to `most` has."""

    def variant(requests: int) -> tuple[DecodeTile, int]:
        tile = decode_tile(requests, heads, device)
        return tile._replace(splits=0), triton.next_power_of_2(tile.splits)

    return one_of_each(variant, most)


def verify_tile(tokens: int, queries: int, heads: int, device: torch.device) -> DecodeTile:
    """The tile of a step that verifies up to `tokens` tokens, of requests with up to `queries` of them; see attention/tiles.py's."""
    return decode_tile(-(-tokens // queries), queries * heads, device)


def warm_verified(queries: int, heads: int, most: int, device: torch.device) -> list[int]:
    """Numbers of tokens whose verifying has all the tiles that any up to `most` has. queries: the most of a request."""
    return [min(most, queries * size) for size in warm_sizes(queries * heads, -(-most // queries), device)]


def prefill_tile() -> PrefillTile:
    return PrefillTile(**_table()["prefill"])


def dense_tile() -> PrefillTile:
    """The tile of a step's own tokens, projected up."""
    return PrefillTile(**_table()["dense"])
