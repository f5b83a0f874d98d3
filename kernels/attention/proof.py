"""hopper.py is used for what it was proven for, on this very GPU and in this process: it must give what prefill.py gives.

Prompts, chunks behind contexts of any length, several of them in a step, windows, and NaN in all that is others'. Takes milliseconds
once both kernels are compiled. `prefill` asks `proven`; workers prove what their model has while they warm up.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns, Extras

REQUESTS = (
    (300, 200),
    (37, 2),
    (0, 90),
    (513, 129),
    (20, 33),
    (128, 256),
    (15, 300),
    (1000, 70),
    (0, 1),
)  # start, count
WINDOWS = (
    16,
    208,
)  # shorter than a tile, and of several; like models' multiples of 16, for which kernels are compiled apart
NEAR = 0.01  # of norms: rounding to 16 bits makes 0.002 of it


class Variant(NamedTuple):
    """A kernel of hopper.py."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype
    windowed: bool
    capped: bool
    sinks: bool = False


_proven: set[Variant] = set()


def variant_of(query: Tensor, keys: Tensor, extras: Extras) -> Variant:
    """query [t, heads, d], keys [blocks, page, kv_heads, d]."""
    _, heads, dim = query.shape
    seen = extras.window > 0, extras.cap > 0, extras.sinks is not None
    return Variant(heads, keys.shape[2], dim, keys.shape[1], keys.dtype, *seen)


def proven(variant: Variant) -> bool:
    return variant in _proven


def prove(variant: Variant, device: torch.device, cap: float = 0.0, *, launched: bool = True) -> str:
    """Why the variant must not be used; "" when it may be, from now on.

    cap: the model's. launched: False where kernels are only compiled (kernels/precompile.py); that proves nothing.
    """
    _proven.discard(variant)
    try:
        errors = [
            error
            for window in (WINDOWS if variant.windowed else (0,))
            for error in _errors(variant, device, cap, window)
        ]
        worst = torch.stack(errors).max() if launched else torch.zeros(())
        wrong = not bool(worst <= NEAR)  # NaN is wrong too
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler or a driver; no kernel is worth the process
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises if the GPU itself has failed
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if wrong:
        return f"it is {float(worst):.3g} of the norm away from prefill.py"
    if launched:
        _proven.add(variant)
    return ""


def _errors(variant: Variant, device: torch.device, cap: float, window: int) -> Iterator[Tensor]:
    """For each request, how far its outputs are from prefill.py's."""
    from meshlm.kernels.attention import hopper
    from meshlm.kernels.attention.prefill import prefill
    from meshlm.kernels.attention.tiles import prefill_tiles, tile_of_head

    sinks = torch.linspace(-2.0, 2.0, variant.heads, device=device).to(variant.dtype) if variant.sinks else None
    extras, scale = Extras(window, cap, sinks), variant.dim**-0.5
    query, keys, values, at = some_step(variant, device)
    if device.type == "cuda" and not hopper.fits(query, keys):
        raise ValueError("it does not take such heads or pages")
    qkv = projection(query, keys, values, at)
    wanted, found = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
    tiles = tile_of_head(prefill_tiles(query.shape[0] * variant.heads), variant.dim)
    prefill(query, keys, values, at, scale, wanted, extras=extras, qkv=qkv, tiles=tiles)
    others_are_nan(keys, values, at, lambda start: max(0, start - window + 1) if window else 0)
    hopper.prefill(query, keys, values, at, scale, found, extras=extras, qkv=qkv)
    begin = 0
    for _, count in REQUESTS:
        part = slice(begin, begin + count)
        yield (found[part].float() - wanted[part].float()).norm() / wanted[part].float().norm()
        begin += count


def some_step(variant: Variant, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Columns]:
    """Requests whose pages lie in any order, among others'."""
    random = torch.Generator(device).manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(variant.dtype)

    lengths = [start + count for start, count in REQUESTS]
    needed = [-(-length // variant.page) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=random, device=device).int()
    blocks = order[-1].repeat(
        len(needed), (max(needed) // 16 + 1) * 16
    )  # as wide as models' tables are: multiples of 16
    for row, pages in enumerate(order[: sum(needed)].split(needed)):
        blocks[row, : len(pages)] = pages
    starts, counts = torch.tensor(REQUESTS, dtype=torch.int32, device=device).unbind(1)
    rows = torch.arange(len(needed), dtype=torch.int32, device=device)
    at = Columns(rows, starts.contiguous(), counts.cumsum(0).int(), len(needed), blocks)
    keys, values = some(2, len(order), variant.page, variant.kv_heads, variant.dim)
    return some(sum(count for _, count in REQUESTS), variant.heads, variant.dim), keys, values, at


def _places(at: Columns, row: int, first: int, last: int, page: int) -> tuple[Tensor, Tensor]:
    """Pages of a request's tokens first .. last - 1, and where in them they are."""
    where = torch.arange(first, last, device=at.blocks.device)
    return at.blocks[row, where // page].long(), where % page


def projection(query: Tensor, keys: Tensor, values: Tensor, at: Columns) -> Tensor:
    """The step's lines: nonsense for queries, then its keys and values."""
    places = [_places(at, row, start, start + count, keys.shape[1]) for row, (start, count) in enumerate(REQUESTS)]
    own_keys, own_values = (torch.cat([cache[place] for place in places]) for cache in (keys, values))
    return torch.cat((torch.full_like(query, 1e3), own_keys, own_values), 1).flatten(1)


def others_are_nan(
    keys: Tensor, values: Tensor, at: Columns, first_seen: Callable[[int], int], *, own: bool = False
) -> None:
    """All that is not a token of an earlier step, or is in a page before the first that a request's tokens see.

    own: what this step's tokens have in pages stays, too.
    """
    page = keys.shape[1]
    read = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
    for row, (start, count) in enumerate(REQUESTS):
        read[_places(at, row, first_seen(start) // page * page, start + count * own, page)] = True
    keys[~read] = values[~read] = torch.nan
