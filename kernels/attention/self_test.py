"""Self-tests of attention at a start, with the heads and pages of the model: prompts, chunks behind contexts of any length, several in
a step, decodes, and NaN in all that is others'.

hopper.py must give what prefill.py gives, and is used for those variants alone that it was verified with, in this process. Chunks of
positions, slopes of heads, heads of more than 256 numbers and caches of 8-bit floats are held against plain torch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from meshlm.kernels import float8
from meshlm.kernels.attention import decode as decodes
from meshlm.kernels.attention import prefill as prompts
from meshlm.kernels.attention.kernel import Columns, Extras
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.requests import PagedStep, Request, decode_workspace
from meshlm.kernels.attention.tiles import Variant, prefill_tiles, tile_of_head, verified
from meshlm.kernels.rope_cache import kernel as rope_cache
from meshlm.kernels.rope_cache import reference as rope_reference
from meshlm.kernels.self_test import Result, distance, why_wrong

REQUESTS: tuple[Request, ...] = (
    (300, 200), (37, 2), (0, 90), (513, 129), (20, 33), (128, 256), (15, 300), (1000, 70), (0, 1),
)  # fmt: skip
# shorter than a tile, and of several; multiples of 16 like models', for which kernels are compiled apart
WINDOWS = 16, 208
CHUNKS = 64, 208  # of positions
SPLITS = 1, 4  # of a decode's context
USUAL = 32, 2, 2  # keys of a decode's tile, warps and stages
NEAR_PREFILL = 0.01  # of norms: rounding to 16 bits makes 0.002 of it
NEAR = 0.02
WRITTEN = 0.98  # of the numbers that are written to a cache are the reference's, at least: others may be its neighbours


def self_test_hopper(variant: Variant, device: torch.device, cap: float = 0.0, *, launched: bool = True) -> str:
    """Why hopper.py must not be used for this variant; "" where it is, from now on. cap: the model's. launched: see `why_wrong`."""
    verified.discard(variant)
    windows = WINDOWS if variant.windowed else (0,)
    results = (result for window in windows for result in _hopper(variant, device, cap, window))
    why = why_wrong(results, launched=launched)
    if launched and not why:
        verified.add(variant)
    return why


def _hopper(variant: Variant, device: torch.device, cap: float, window: int) -> Iterator[Result]:
    """For each request, how far its outputs are from prefill.py's."""
    from meshlm.kernels.attention import hopper  # its dialect takes long to import, and is not in every Triton

    sinks = torch.linspace(-2.0, 2.0, variant.heads, device=device).to(variant.dtype) if variant.sinks else None
    extras, scale = Extras(window, cap, sinks), variant.dim**-0.5
    step = _step(variant, device)
    if device.type == "cuda" and not hopper.fits(step.query, step.keys):
        raise ValueError("it does not take such heads or pages")
    qkv = step.projection()
    wanted, found = torch.full_like(step.query, torch.nan), torch.full_like(step.query, torch.nan)
    prompts.prefill(*step[:4], scale, wanted, extras=extras, qkv=qkv, tiles=_tiles(variant, step))
    step.spoil_others(lambda start: max(0, start - window + 1) if window else 0)
    hopper.prefill(*step[:4], scale, found, extras=extras, qkv=qkv)
    counts = [count for _, count in REQUESTS]
    for mine, theirs in zip(found.split(counts), wanted.split(counts), strict=True):
        yield Result("it is", distance(mine, theirs), NEAR_PREFILL, "of the norm away from prefill.py")


def self_test_chunks(variant: Variant, device: torch.device) -> str:
    """Why attention in chunks must not be left to the kernels; "" where it may be."""
    kinds = [Extras(cap=30.0 * variant.capped, chunk=chunk) for chunk in CHUNKS]
    return why_wrong(result for extras in kinds for result in _extras(variant, device, extras))


def self_test_slopes(variant: Variant, slopes: tuple[float, ...], device: torch.device) -> str:
    """The same of a model's slopes, one for each head."""
    extras = Extras(cap=30.0 * variant.capped, slopes=torch.tensor(slopes, device=device))
    return why_wrong(_extras(variant, device, extras))


def self_test_heads(variant: Variant, device: torch.device) -> str:
    """The same of heads of this size, whose tiles are others than those that are measured."""
    return why_wrong(_extras(variant, device, Extras(cap=30.0 * variant.capped)))


def _extras(variant: Variant, device: torch.device, extras: Extras) -> Iterator[Result]:
    """Prompts with and without their projection, and each request's last token as a decode."""

    def first_seen(position: int) -> int:
        return position // extras.chunk * extras.chunk if extras.chunk else 0

    scale, step = variant.dim**-0.5, _step(variant, device)
    (query, keys, values, at, _), qkv = step, step.projection()
    expected = attention(query, keys, values, at, scale, extras)
    counts = at.ends.diff(prepend=at.ends.new_zeros(1))
    last = Columns(at.rows, at.starts + counts - 1, torch.arange(1, at.n + 1, device=device).int(), at.n, at.blocks)
    step.spoil_others(first_seen, own=True)
    for given in (None, qkv):
        out = torch.full_like(query, torch.nan)
        prompts.prefill(
            query, keys, values, at, scale, out, extras=extras, qkv=given, tiles=_tiles(variant, step)
        )  # fmt: skip
        yield Result("it is", distance(out, expected), NEAR)
    ends = at.ends.long() - 1
    for parts in SPLITS:
        splits, block_n, warps, stages = tile_of_head((parts, *USUAL), variant.dim)
        out = torch.full_like(query[ends], torch.nan)
        workspace = decode_workspace(at.n, variant.heads, variant.kv_heads, variant.dim, splits, device)
        decodes.decode(
            query[ends], keys, values, last, scale, out, workspace, splits, extras,
            block_n=block_n, warps=warps, stages=stages,
        )  # fmt: skip
        yield Result("it is", distance(out, expected[ends]), NEAR)


def _step(variant: Variant, device: torch.device) -> PagedStep:
    heads = variant.heads, variant.kv_heads, variant.dim
    return PagedStep.random(REQUESTS, heads, variant.page, variant.dtype, device)


def _tiles(variant: Variant, step: PagedStep) -> tuple[int, int, int, int]:
    return tile_of_head(prefill_tiles(step.query.shape[0] * variant.heads), variant.dim)


class CacheShape(NamedTuple):
    """The heads of a model's layers, and the cache of 8-bit floats that they have."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype  # of the cache


CACHED: tuple[Request, ...] = ((0, 20), (33, 7), (40, 1), (5, 1))  # the last two are decodes
SCALED = Extras(k_scale=0.5, v_scale=0.25)


def self_test_cache(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernels must not be used for a cache of a type that not every GPU converts; "" where they may be. dtype: of the model."""
    return why_wrong(_cache(shape, dtype, device))


def _cache(shape: CacheShape, dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    heads, kv_heads, dim, page, kind = shape
    step = PagedStep.random(CACHED, (heads, kv_heads, dim), page, torch.float32, device)
    places = [step.places(row, start, start + count) for row, (start, count) in enumerate(CACHED)]
    slots = torch.cat([pages * page + within for pages, within in places])
    positions = torch.cat([torch.arange(start, start + count, device=device) for start, count in CACHED])
    angles = torch.outer(torch.arange(64.0, device=device), 1e-4 ** (torch.arange(0, dim, 2, device=device) / dim))
    table = torch.cat((angles.cos(), angles.sin()), 1)
    keys, values = (float8.stored(cache, 1.0, kind) for cache in (step.keys, step.values))
    qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    qkv[3] *= 4000  # more than e4m3 holds, and than e5m2 holds divided by the scale of values
    wanted, scales = (keys.clone(), values.clone()), (SCALED.k_scale, SCALED.v_scale)
    rope_reference.rope_cache(qkv.clone(), positions, slots, table, None, 0.0, *wanted, heads, *scales)
    query = rope_cache.rope_cache(qkv, positions, slots, table, None, 0.0, keys, values, heads, *scales)
    for cache, right in zip((keys, values), wanted, strict=True):
        differ = (float8.as_bytes(cache) != float8.as_bytes(right)).float().mean()
        what = f"what is written to a cache of {kind} is not what must be:"
        yield Result(what, differ, 1 - WRITTEN, "of the numbers differ")
    query[3] = 0  # its scores would be infinite
    out, scale = torch.zeros_like(query), dim**-0.5
    workspace = decode_workspace(len(CACHED), heads, kv_heads, dim, 1, device)
    prompts.prefill(query, keys, values, step.at, scale, out, extras=SCALED, fewest=2)
    decodes.decode(query, keys, values, step.at, scale, out, workspace, 1, SCALED)
    right = attention(query, keys, values, step.at, scale, SCALED)
    yield Result(f"attention over a cache of {kind} is", distance(out, right), NEAR)
