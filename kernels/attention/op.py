"""The records of attention: decodes, drafts that are verified, prompts, and prompts by hopper.py, with the heads of models and what few
models' queries see."""

from functools import partial
from itertools import product

import torch
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention import reference
from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.kernel import Extras
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.requests import PagedStep, decode_workspace, one_by_one
from meshlm.kernels.attention.tiles import (
    SHORT_CONTEXT,
    VerifyTile,
    decode_tiles,
    prefill_tiles,
    splits_of,
    tile_of_head,
    verify_lines,
    verify_tile,
)
from meshlm.kernels.attention.verify import verify
from meshlm.kernels.op import Case, Launch, Op, Tile
from meshlm.kernels.rope_cache import reference as rope_reference

PAGE, EPS = 16, 1e-6
Heads = tuple[int, int, int]  # of queries, of keys, numbers of each
HEADS: list[Heads] = [(32, 8, 128), (16, 8, 128)]
DECODES = [(1, 4096), (1, 32768), (8, 4096), (32, 4096), (64, 1024), (128, 4096), (256, 1024)]  # requests, context
LONG_DECODES = [(4, 32768), (1, 131072), (4, 131072)]
VERIFIED_HEADS: list[Heads] = [(32, 8, 128), (64, 8, 128), (16, 8, 128)]
VERIFIED = [
    (1, 5, 4096),
    (1, 16, 4096),
    (16, 2, 4096),
    (16, 5, 4096),
    (64, 5, 1024),
    (64, 5, 4096),
]  # requests, tokens of each, context
PREFILLS = [(1, 1024), (8, 1024), (1, 2048), (1, 8192), (4, 2048), (1, 32768)]  # requests, tokens
# tokens of one prompt, behind those of earlier steps, which are in pages
CHUNKS = [(1024, 24576), (2048, 24576), (8192, 24576)]
SCOUT, BLOOM = ((40, 8, 128), ("chunk", 8192)), ((32, 32, 128), ("slopes",))  # Llama 4 Scout; BLOOM 7B
SEEN_DECODES = [(1, 6144), (32, 6144), (32, 30720)]  # contexts that end in the middle of a chunk, at 3/4 of one
SEEN_PREFILLS = [(1, 8192, 0), (1, 4096, 30720), (1, 16384, 0)]  # requests, tokens, those before
OTHER_HEADS = [  # and their models' windows, 0: none
    ((64, 8, 64), (0, 128)),  # gpt-oss
    ((32, 32, 80), (0,)),  # Phi-2
    ((32, 32, 96), (0, 2047)),  # Phi-3-mini
    ((32, 8, 112), (0,)),
    ((32, 16, 128), (0, 1024)),  # Gemma 3 27B
    ((128, 128, 192), (0,)),  # DeepSeek-V3's prompts
    ((8, 4, 256), (0, 1024)),  # Gemma 3 4B
    ((16, 8, 256), (0, 4096)),  # Gemma 2 9B
]
OTHER_PREFILLS = [(1, 512), (4, 512), (1, 2048), (8, 1024), (1, 8192)]
PER_MULTIPROCESSOR = (2.0, 4.0, 8.0)
DECODE_TILES = [(16, 1, 2), (32, 1, 2), (32, 2, 2), (64, 2, 2), (64, 4, 2)]  # keys, warps, stages
VERIFY_TILES = [(16, 4, 2), (32, 4, 2), (32, 8, 2), (64, 2, 2), (64, 4, 2), (64, 8, 2), (64, 4, 3)]
PREFILL_TILES = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2)]
PREFILL_ROWS = (64, 128)


def _extras(seen: Case, heads: int, device: torch.device) -> Extras:
    """seen: a kind of what queries see, with its size."""
    match seen:
        case ("window", size):
            return Extras(window=size)
        case ("chunk", size):
            return Extras(chunk=size)
        case ("slopes",):
            return Extras(slopes=2.0 ** -torch.linspace(0.25, 8.0, heads, device=device))
    return Extras()


def _decode(
    dtype: torch.dtype, device: torch.device, n: int, context: int, heads: Heads, seen: Case = (), tile: Tile = ()
) -> Launch:
    """As in a model's decode, which rotates query and key itself. tile: programs per multiprocessor; keys, warps and stages."""
    num, kv_heads, dim = heads
    step, extras = PagedStep.random([(context - 1, 1)] * n, heads, PAGE, dtype, device), _extras(seen, num, device)
    (_, keys, values, at, _), rope = step, Rope(torch.randn(context, dim, device=device), None, EPS, num)
    qkv = torch.randn(n, (num + 2 * kv_heads) * dim, device=device).to(dtype)
    splits, block_n, warps, stages = 4, 32, 2, 2
    if device.type == "cuda":
        splits, block_n, warps, stages = decode_tiles(n * kv_heads, context, device, num // kv_heads, dim)
    if tile:
        per, (block_n, warps, stages) = tile
        splits = splits_of(n * kv_heads, per, pdl.multiprocessors(device))
    workspace, out = decode_workspace(n, num, kv_heads, dim, splits, device), torch.empty_like(step.query)

    def run() -> list[Tensor]:
        decode(
            qkv, keys, values, at, dim**-0.5, out, workspace, splits, extras, rope,
            block_n=block_n, warps=warps, stages=stages,
        )  # fmt: skip
        return [out, keys, values]

    def expected() -> list[Tensor]:
        positions = at.starts.long()
        slots = at.blocks[at.rows.long(), positions // PAGE].long() * PAGE + positions % PAGE
        cache = keys.clone(), values.clone()
        query = rope_reference.rope_cache(qkv.clone(), positions, slots, rope.table, None, EPS, *cache, num)
        return [reference.attention(query, *cache, at, dim**-0.5, extras), *cache]

    read = (context - 1) % extras.chunk + 1 if extras.chunk else context
    return Launch(run, expected, n * read * 2 * kv_heads * dim * keys.element_size())


def _verify(
    dtype: torch.dtype, device: torch.device, n: int, queries: int, context: int, heads: Heads, seen: Case = (), tile: Tile = ()
) -> Launch:  # fmt: skip
    """Beside it what its kernel is for: each token as a request of its own. tile: see `_decode`."""
    num, kv_heads, dim = heads
    step, extras = (
        PagedStep.random([(context - queries, queries)] * n, heads, PAGE, dtype, device),
        _extras(seen, num, device),
    )
    (query, keys, values, at, _), lines = step, verify_lines(queries * num // kv_heads, dim)
    chosen, alone = VerifyTile(lines, 4, 32, 4, 2), (4, 32, 2, 2)
    if device.type == "cuda":
        chosen = verify_tile(n * queries, queries, kv_heads, context, device, num // kv_heads, dim)
        alone = tile_of_head(decode_tiles(n * queries * kv_heads, context, device, num // kv_heads, dim), dim)
    if tile:
        programs = n * kv_heads * chosen.of(queries, num // kv_heads)
        chosen = VerifyTile(lines, splits_of(programs, tile[0], pdl.multiprocessors(device)), *tile[1])
    workspace, out = decode_workspace(len(query), num, kv_heads, dim, chosen.splits, device), torch.empty_like(query)
    tokens, (splits, block_n, warps, stages) = one_by_one(at, queries), alone
    apart, other = decode_workspace(len(query), num, kv_heads, dim, splits, device), torch.empty_like(query)

    def run() -> Tensor:
        verify(query, keys, values, at, dim**-0.5, out, workspace[:2], queries, chosen, extras)
        return out

    def each_alone() -> Tensor:
        decode(
            query, keys, values, tokens, dim**-0.5, other, apart, splits, extras, block_n=block_n, warps=warps, stages=stages
        )  # fmt: skip
        return other

    def expected() -> Tensor:
        return reference.attention(query, keys, values, at, dim**-0.5, extras)

    num_bytes = n * context * 2 * kv_heads * dim * keys.element_size()
    return Launch(run, expected, num_bytes, beside={"one_by_one": each_alone})


def _prefill(
    dtype: torch.dtype, device: torch.device, n: int, tokens: int, heads: Heads, start: int = 0, seen: Case = (),
    tile: Tile = (), hopper: bool = False,
) -> Launch:  # fmt: skip
    """tile: rows; keys, warps and stages."""
    num, _, dim = heads
    step, extras = PagedStep.random([(start, tokens)] * n, heads, PAGE, dtype, device), _extras(seen, num, device)
    qkv, out = step.projection(), torch.empty_like(step.query)
    tiles = (tile[0], *tile[1]) if tile else tile_of_head(prefill_tiles(n * tokens * num), dim)

    def run() -> Tensor:
        if hopper:
            from meshlm.kernels.attention import hopper as on_hopper  # its dialect is not in every Triton

            if not on_hopper.fits(step.query, step.keys):
                raise ValueError("it does not take such heads, or this GPU does not take it")
            on_hopper.prefill(*step[:4], dim**-0.5, out, extras=extras, qkv=qkv)
        else:
            prefill(*step[:4], dim**-0.5, out, extras=extras, qkv=qkv, tiles=tiles)
        return out

    def expected() -> Tensor:
        return reference.attention(*step[:4], dim**-0.5, extras)

    pairs = (start + tokens / 2) * tokens
    if extras.chunk:
        pairs = sum(position % extras.chunk + 1 for position in range(start, start + tokens))
    return Launch(run, expected, num_flop=n * 4 * pairs * num * dim)


def _seen(cases: list[Case]) -> list[Case]:
    """With what few models' queries see, each beside the same without."""
    both = [(heads, seen) for heads, kind in (SCOUT, BLOOM) for seen in (kind, ())]
    return [(*case[:2], heads, *case[2:], seen) for (heads, seen), case in product(both, cases)]


OTHERS: list[Case] = [
    (*case, heads, 0, ("window", window) if window else ())
    for heads, windows in OTHER_HEADS
    for window, case in product(windows, OTHER_PREFILLS)
]
PROMPTS: list[Case] = [(*case, heads) for heads in HEADS for case in PREFILLS]
BEHIND: list[Case] = [(1, tokens, heads, start) for heads in HEADS for tokens, start in CHUNKS]
SHORT: list[Case] = [case for case in PROMPTS if case[1] <= SHORT_CONTEXT]
OPS = (
    Op(
        "decode", _decode, near=2,
        cases=[(3, 100, (4, 2, 64)), (2, 37, (3, 1, 80)), (1, 257, (6, 2, 64), ("chunk", 24)), (2, 90, (4, 4, 32), ("slopes",))],
        of_models=[(*case, heads) for heads in HEADS for case in (*DECODES, *LONG_DECODES)] + _seen(SEEN_DECODES),
        candidates=lambda case: list(product(PER_MULTIPROCESSOR, DECODE_TILES)),
        tuned=[(*case, heads) for heads in HEADS for case in DECODES],
    ),
    Op(
        "verify", _verify, near=2,
        cases=[(3, 4, 100, (4, 2, 64)), (2, 16, 70, (6, 1, 64)), (2, 3, 57, (6, 2, 80), ("chunk", 24))],
        of_models=[(*case, heads) for heads in VERIFIED_HEADS for case in VERIFIED],
        candidates=lambda case: list(product(PER_MULTIPROCESSOR, VERIFY_TILES)),
    ),
    Op(
        "prefill", _prefill, near=2,
        cases=[(2, 33, (4, 2, 64), 20), (1, 70, (6, 2, 64), 0, ("window", 40)), (3, 17, (8, 1, 80), 5, ("chunk", 24))],
        of_models=[*PROMPTS, *BEHIND, *_seen(SEEN_PREFILLS), *OTHERS],
        candidates=lambda case: list(product(PREFILL_ROWS, PREFILL_TILES)),
        tuned=SHORT,
    ),
    Op(
        "prefill_by_hopper", partial(_prefill, hopper=True), of_models=[*PROMPTS, *BEHIND, *OTHERS], tuned=SHORT,
        candidates=lambda case: [()],
        near=2, cases=[(2, 133, (8, 2, 128), 20)], dtypes=(torch.float16, torch.bfloat16), needs=9,
    ),
)  # fmt: skip
