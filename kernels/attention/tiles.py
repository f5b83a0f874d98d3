"""Chooses the tiles of attention on this GPU, from tables/<gpu>.json, which tuning/measure_tables.py writes."""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.attention.kernel import Extras

MAX_SPLITS = 32
HOPPER_ROWS = 128  # of a tile of hopper.py: queries x query heads of a kv head
MEASURED_DIM, LARGE_DIM = 128, 256
SHORT_CONTEXT = 8192  # tokens: a lone request up to here is bound by latency, and has tiles of its own
Tile = tuple[int, int, int, int]
USUAL_KEYS = 512  # that a prompt token sees, where nothing is known of its prompt
SHARED_ROWS, SHARED_TILE = 64, (64, 4, 2)  # of shared_prefix.py: requests x query heads; keys of a tile, warps, stages
SHARED_FEWEST = 4  # requests of a tile: models with more query heads for a kv head gain little
SHARED_PROGRAMS = 2  # that a multiprocessor gets of a launch
VERIFY_LINES = 128  # of verify.py: queries x query heads of a tile
MOST_SUMS, SUMS_OF_WARP = 1 << 14, 1 << 11  # numbers of a tile's sums: 64 of each thread, of 8 warps at most
MANY_LINES = 32  # of a tile, from which on four warps have the registers for them


@cache
def _table() -> tuple[float, list[dict[str, int]], list[dict[str, int]]]:
    """Programs per multiprocessor and tiles of a decode, tiles of a prompt. The first that fits is used.

    Those that a whole step has chosen (`group_to`, --tune full) are for that processor."""
    table = tables.read("attention")
    alike = tables.is_alike(table)
    decode = [entry for entry in table["decode"] if alike or "group_to" not in entry]
    return table["programs_per_multiprocessor"], decode, table["prefill"]


def prefill_tiles(work: int) -> Tile:
    """Rows of a tile, keys of a tile, warps, stages, for so many tokens x query heads: smaller tiles leave no multiprocessor idle."""
    for entry in _table()[2]:
        if work <= entry.get("work_to", work):
            return entry["rows"], entry["block_n"], entry["warps"], entry["stages"]
    raise AssertionError("the last entry of a table fits all")


@cache
def hopper_from(dim: int, window: int = 0) -> float:
    """Query-key pairs x query heads of a step's prompts from which on hopper.py is the faster, with heads of so many numbers.

    Infinity where no table of this compute capability says so, and for windows (0: none) that are shorter than it says."""
    table = tables.read("attention")
    if not tables.is_kin(table) or 0 < window < table.get("hopper_windows", {}).get(str(dim), math.inf):
        return math.inf
    return float(table.get("hopper_from", {}).get(str(dim), math.inf))


class Variant(NamedTuple):
    """A kernel of hopper.py: the model's heads and pages, and what its queries see."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype
    windowed: bool
    capped: bool
    sinks: bool = False


verified: set[Variant] = set()
"""Those that a self-test has found right in this process: no others are launched."""


def variant_of(query: Tensor, keys: Tensor, extras: Extras) -> Variant:
    """query [t, heads, d], keys [blocks, page, kv_heads, d]."""
    _, heads, dim = query.shape
    seen = extras.window > 0, extras.cap > 0, extras.sinks is not None
    return Variant(heads, keys.shape[2], dim, keys.shape[1], keys.dtype, *seen)


def hopper_wave(heads: int, kv_heads: int, device: torch.device) -> int:
    """Tokens of a prompt's chunk behind a long context whose tiles hopper.py computes all at once: a program fills a multiprocessor."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return HOPPER_ROWS // (heads // kv_heads) * multiprocessors // kv_heads


def tile_of_head(tile: Tile, dim: int) -> Tile:
    """A tile of a table, which is for heads of up to 128: larger ones have fewer keys, or keys and values outgrow the shared memory.

    Those of more than 256 have fewer queries too, and more warps, or their sums outgrow the registers. first: queries, or parts of a
    context, which are no more than 32."""
    if dim <= MEASURED_DIM:
        return tile
    first, block_n, warps, stages = tile
    if dim > LARGE_DIM:
        return min(first, MAX_SPLITS), min(block_n, 16), 8, min(stages, 2)
    return first, min(block_n, 32), warps, min(stages, 2)


ANY_GROUP = 1 << 16


def decode_tiles(
    programs: int, longest: int, device: torch.device, group: int = ANY_GROUP, dim: int = MEASURED_DIM
) -> Tile:
    """Parts of each context (a power of two), keys of a tile, warps, stages, of a decode; as `tile_of_head` takes it.

    programs: requests x kv heads. Contexts are of up to `longest` tokens; a kv head has `group` query heads of `dim` numbers.

    Enough parts to fill the GPU. A lone request of a short context is bound by latency: there the smallest tile wins on an H200, which
    loses a third at 32k; and with many query heads for a kv head fewer parts may, since one program puts all of them together."""
    per_multiprocessor, tiles, _ = _table()
    splits = splits_of(programs, per_multiprocessor, torch.cuda.get_device_properties(device).multi_processor_count)
    for entry in tiles:
        fits = splits >= entry.get("splits_from", 1) and longest <= entry.get("longest_to", longest)
        fits = fits and dim >= entry.get("dim_from", dim)
        if fits and entry.get("group_from", group) <= group <= entry.get("group_to", group):
            return min(splits, entry.get("splits_to", splits)), entry["block_n"], entry["warps"], entry["stages"]
    raise AssertionError("the last entry of a table fits all")


class VerifyTile(NamedTuple):
    """The launch of verify.py."""

    lines: int  # queries x query heads of a tile, a power of two
    splits: int  # parts of each context, a power of two
    block_n: int  # keys of a tile
    warps: int
    stages: int

    def of(self, queries: int, group: int) -> int:
        """Tiles of a request with so many queries, and of query heads of a kv head."""
        return -(-queries * group // self.lines)


def verify_tile(
    tokens: int, queries: int, kv_heads: int, longest: int, device: torch.device, group: int, dim: int = MEASURED_DIM
) -> VerifyTile:
    """The tile of a step that verifies up to `tokens` tokens, of requests with up to `queries` of them: as the same requests' decode
    has it (`decode_tiles`), with as many warps as more lines need.

    Most requests have all the drafts that they may have, so there are as many as would fill the tokens. Where they have fewer there
    are more requests, whose contexts are then split further than the GPU needs."""
    lines = verify_lines(queries * group, dim)
    programs = -(-tokens // queries) * kv_heads * -(-queries * group // lines)
    splits, block_n, warps, stages = tile_of_head(decode_tiles(programs, longest, device, group, dim), dim)
    least = lines * triton.next_power_of_2(dim) // SUMS_OF_WARP
    return VerifyTile(lines, splits, block_n, max(warps, least, 4 if lines >= MANY_LINES else 1), stages)


def verify_lines(lines: int, dim: int) -> int:
    """Lines of a tile for queries x query heads of so many numbers: what the registers have room for, and a product needs."""
    most: int = min(VERIFY_LINES, MOST_SUMS // triton.next_power_of_2(dim), triton.next_power_of_2(lines))
    return max(16, most)


def warm_sizes(
    kv_heads: int, most: int, longest: int, device: torch.device, group: int = ANY_GROUP, dim: int = MEASURED_DIM
) -> list[int]:
    """Numbers of requests, 1 and `most` among them, whose decodes have all the tiles that any up to `most` has: each is compiled."""
    return one_of_each(lambda requests: decode_tiles(requests * kv_heads, longest, device, group, dim), most)


def warm_verified(
    queries: int, kinds: list[tuple[int, int, int]], most: int, longest: int, device: torch.device
) -> list[int]:
    """Numbers of tokens, 1 and `most` among them, whose verifying has all the tiles that any up to `most` has. queries: the most of a
    request. kinds: heads of layers, of queries and of keys, and their numbers."""

    def tiles(tokens: int) -> tuple[VerifyTile, ...]:
        return tuple(
            verify_tile(tokens, queries, kv_heads, longest, device, heads // kv_heads, dim)
            for heads, kv_heads, dim in kinds
        )

    return one_of_each(tiles, most)


def one_of_each(variant: Callable[[int], object], most: int) -> list[int]:
    """Powers of two, `most`, and the first number with each variant that none of those has."""
    sizes = [1 << power for power in range((most - 1).bit_length())] + [most]
    seen = {variant(size) for size in sizes}
    for size in range(1, most + 1):
        if variant(size) not in seen:
            seen.add(variant(size))
            sizes.append(size)
    return sorted(sizes)


def most_parts(device: torch.device) -> int:
    """Programs x splits of any decode on this GPU whose contexts are split, whatever its requests."""
    return most_parts_of(_table()[0], torch.cuda.get_device_properties(device).multi_processor_count)


def most_parts_of(per_multiprocessor: float, multiprocessors: int) -> int:
    """`splits_of` rounds what each program would get up to less than twice that."""
    return int(2 * per_multiprocessor * multiprocessors)


def splits_of(programs: int, per_multiprocessor: float, multiprocessors: int) -> int:
    """Parts of each context, a power of two."""
    wanted = per_multiprocessor * multiprocessors / programs
    return min(MAX_SPLITS, triton.next_power_of_2(int(wanted))) if wanted >= 2 else 1


class SharedSizes(NamedTuple):
    """How much a step's shared prefixes (kernel.py) may be, by its number of requests: a CUDA graph has room for that."""

    tile: int  # requests of one
    pieces: int  # of prefixes, that fill the GPU

    def num_items(self, requests: int) -> int:
        """Each of a cluster's tiles has one more than its share of the pieces, and there is no tile for each two requests."""
        return self.pieces + requests // 2

    def most_parts(self, requests: int) -> int:
        """Pieces of one prefix, where all requests share it: what they leave is small then, however many requests there are."""
        return min(MAX_SPLITS, -(-self.pieces // -(-requests // self.tile)))


def shared_sizes(heads: int, kv_heads: int, multiprocessors: int) -> SharedSizes | None:
    """The sizes for layers with so many heads; None where a tile would have too few requests."""
    requests = SHARED_ROWS // triton.next_power_of_2(heads // kv_heads)
    if requests < SHARED_FEWEST:
        return None
    return SharedSizes(requests, -(-SHARED_PROGRAMS * multiprocessors // kv_heads))


def shared_tile(dim: int) -> tuple[int, int, int]:
    """Keys of a tile of shared_prefix.py, its warps and stages, for heads of up to 256 numbers."""
    if dim <= MEASURED_DIM:
        return SHARED_TILE
    return 32, 8, 2


def warm_shared(
    sizes: SharedSizes, kinds: list[tuple[int, int, int]], most: int, longest: int, device: torch.device
) -> list[int]:
    """Numbers of requests, up to `most`, whose decodes have all variants of a launch with shared prefixes. kinds: heads of layers, of
    queries and of keys, and their numbers."""
    found: dict[tuple[object, ...], int] = {}
    for requests in range(most, 1, -1):
        tiles = [
            decode_tiles(requests * kv_heads, longest, device, heads // kv_heads, dim) for heads, kv_heads, dim in kinds
        ]
        parts = sizes.most_parts(requests)
        found.setdefault(tuple((tile, triton.next_power_of_2(parts + tile[0])) for tile in tiles), requests)
    return list(found.values())
