"""Whether the Triton kernels see what few models' queries see, on this very GPU: small cases against plain torch.

Asked by a worker's start for chunks of positions, for slopes of heads and for heads of more than 256 numbers: prompts, parts of prompts
and decodes, and NaN in all that is others'.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshlm.kernels.attention.decode import decode
from meshlm.kernels.attention.kernel import Columns, Extras
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.proof import Variant, others_are_nan, projection, some_step
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.tiles import prefill_tiles, tile_of_head

NEAR = 0.02  # of norms
CHUNKS = (64, 208)  # tokens; like models' multiples of 16, for which kernels are compiled apart
SPLITS = (1, 4)
USUAL = (32, 2, 2)  # keys of a decode's tile, warps and stages


def prove_chunks(variant: Variant, device: torch.device) -> str:
    """Why attention in chunks must not be left to the kernels; "" when it may be."""
    return _said(variant, device, [Extras(cap=30.0 * variant.capped, chunk=chunk) for chunk in CHUNKS])


def prove_slopes(variant: Variant, slopes: tuple[float, ...], device: torch.device) -> str:
    """The same of a model's slopes, one for each head."""
    given = torch.tensor(slopes, device=device)
    return _said(variant, device, [Extras(cap=30.0 * variant.capped, slopes=given)])


def prove_heads(variant: Variant, device: torch.device) -> str:
    """The same of heads of this size, whose tiles are others than those that are measured."""
    return _said(variant, device, [Extras(cap=30.0 * variant.capped)])


def _said(variant: Variant, device: torch.device, kinds: list[Extras]) -> str:
    try:
        worst = max(float(error) for extras in kinds for error in _errors(variant, device, extras))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler or a driver; no kernel is worth the process
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises if the GPU itself has failed
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return "" if worst <= NEAR else f"it is {worst:.3g} of the norm away from plain torch"


def _errors(variant: Variant, device: torch.device, extras: Extras) -> Iterator[Tensor]:
    """How far outputs are from plain torch's, in parts of their norm; infinite where there is a NaN."""

    def first_seen(position: int) -> int:
        return position // extras.chunk * extras.chunk if extras.chunk else 0

    scale = variant.dim**-0.5
    query, keys, values, at = some_step(variant, device)
    expected, qkv = attention(query, keys, values, at, scale, extras), projection(query, keys, values, at)
    tiles = tile_of_head(prefill_tiles(query.shape[0] * variant.heads), variant.dim)
    counts = at.ends.diff(prepend=at.ends.new_zeros(1))
    last = Columns(at.rows, at.starts + counts - 1, torch.arange(1, at.n + 1, device=device).int(), at.n, at.blocks)
    others_are_nan(keys, values, at, first_seen, own=True)
    for step in (None, qkv):
        out = torch.full_like(query, torch.nan)
        prefill(query, keys, values, at, scale, out, extras=extras, qkv=step, tiles=tiles)
        yield _error(out, expected)
    ends = at.ends.long() - 1  # each request's last token, alone
    for parts in SPLITS:
        splits, block_n, warps, stages = tile_of_head((parts, *USUAL), variant.dim)
        out = torch.full_like(query[ends], torch.nan)
        workspace = (
            torch.empty(out.numel() * splits, device=device),
            torch.empty(at.n * variant.heads * splits * 2, device=device),
            torch.zeros(at.n * variant.kv_heads, dtype=torch.int32, device=device),
        )
        decode(
            query[ends], keys, values, last, scale, out, workspace, splits, extras,
            block_n=block_n, warps=warps, stages=stages,
        )  # fmt: skip
        yield _error(out, expected[ends])


def _error(found: Tensor, expected: Tensor) -> Tensor:
    error = (found.float() - expected).norm() / expected.norm()
    return torch.where(error.isnan(), torch.inf, error)
