"""The records of latent attention: decodes, drafts that are verified, and prompts both ways, with what each needs around it. Sizes of
DeepSeek-V2 and V3 (128 heads) and of V2-Lite (16). Caches of several layers take turns, so that they come from memory."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.requests import one_by_one, some_columns
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.dense import context as see_context
from meshlm.kernels.mla.dense import dense
from meshlm.kernels.mla.prefill import prefill
from meshlm.kernels.mla.reference import absorbed_attention
from meshlm.kernels.mla.tiles import MOST_HEADS, DecodeTile, PrefillTile, decode_tile, splits_of, verify_tile
from meshlm.kernels.op import Case, Launch, Op, Tile

PAGE, SCALE = 16, 0.1
Sizes = tuple[int, int, int, int]  # numbers of a head without a position, of a latent, with a position, of a value
DEEPSEEK: Sizes = (128, 512, 64, 128)
COLD = 200 << 20  # bytes of caches that take turns: more than the GPU keeps
DECODES = [(1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 1024), (32, 4096), (48, 4096), (64, 4096), (128, 4096)]
VERIFIED = [(queries, n, 4096) for n in (1, 8, 32, 64) for queries in (2, 4)]  # tokens of a request, requests, context
PROMPTS = [(64, 0), (128, 0), (256, 0), (512, 0), (2048, 0), (8192, 0), (128, 4096), (512, 4096), (2048, 4096)]
HEADS = [16, 128]
PER_MULTIPROCESSOR = (1.0, 2.0, 3.0)
# Lines of a tile, warps, stages, and whether lines are the rows of the products. A stage of 64 lines takes 72 KiB of the 227 that a
# multiprocessor shares: where only one program fits, nothing is read while it begins and ends.
FEW_HEADS = [
    (16, 4, 5, False), (16, 4, 6, False), (32, 4, 3, False), (32, 4, 4, False), (32, 4, 5, False), (32, 8, 3, False),
    (64, 4, 2, False), (64, 4, 3, False), (64, 8, 3, False), (64, 8, 4, False), (64, 4, 2, True), (64, 4, 3, True),
]  # fmt: skip
MANY_HEADS = [(32, 8, 3, False), (64, 8, 2, False), (64, 8, 3, False)]
TUNED_DECODES = {16: [(1, 4096), (8, 4096), (32, 1024), (32, 4096), (48, 4096), (64, 4096), (128, 4096)]}
TUNED_DECODES[128] = [(1, 4096), (32, 4096), (128, 4096)]
ABSORBED = [(32, 32, 4, 3), (64, 32, 4, 3), (64, 32, 8, 3), (64, 64, 8, 2), (64, 64, 8, 3)]
PROJECTED = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3)]
TUNED_PROMPTS = [(512, 0), (4096, 0)]


def _decode(
    dtype: torch.dtype, device: torch.device, n: int, context: int, heads: int, sizes: Sizes = DEEPSEEK, tile: Tile = (),
    queries: int = 1,
) -> Launch:  # fmt: skip
    """tile: programs per multiprocessor, and one of FEW_HEADS or MANY_HEADS. queries: tokens of each request."""
    nope, rank, rotary, _ = sizes
    at, pages = some_columns([(context - queries, queries)] * n, PAGE, device)
    read = n * context * (rank + rotary) * dtype.itemsize
    layers = min(64, -(-COLD // read)) if device.type == "cuda" else 1
    caches = [torch.randn(pages, PAGE, rank + rotary, device=device).to(dtype) for _ in range(layers)]
    absorbed = torch.randn(n * queries, heads, rank, device=device).to(dtype)
    query, out = torch.randn(n * queries, heads, nope + rotary, device=device).to(dtype), torch.empty_like(absorbed)
    chosen = verify_tile(n * queries, queries, heads, device)
    if tile:
        block_h = min(MOST_HEADS, heads)
        splits = splits_of(n * -(-heads // block_h), int(tile[0] * pdl.multiprocessors(device)))
        block_n, warps, stages, of_lines = tile[1]
        chosen = DecodeTile(splits, block_n, warps, stages, block_h, of_lines)
    parts = n * queries * heads * chosen.splits
    workspace = torch.empty(parts * rank, device=device), torch.empty(parts * 2, device=device)

    def run() -> Tensor:
        for cache in caches:
            decode(absorbed, query, cache, at, SCALE, out, workspace, chosen, queries=queries)
        return out

    def expected() -> Tensor:
        return absorbed_attention(absorbed, query[..., nope:], caches[-1], at, SCALE)[0]

    tokens, alone = one_by_one(at, queries), decode_tile(len(query), heads, device)
    parts = len(query) * heads * alone.splits
    apart = torch.empty(parts * rank, device=device), torch.empty(parts * 2, device=device)

    def each_alone() -> Tensor:
        for cache in caches:
            decode(absorbed, query, cache, tokens, SCALE, out, apart, alone)
        return out

    beside = {"one_by_one": each_alone} if queries > 1 else {}
    return Launch(run, expected, read, beside=beside, copies=layers)


def _verify(
    dtype: torch.dtype, device: torch.device, queries: int, n: int, context: int, heads: int, sizes: Sizes = DEEPSEEK
) -> Launch:
    """Beside it what its kernel is for: each token as a request of its own."""
    return _decode(dtype, device, n, context, heads, sizes, queries=queries)


class _Prompt:
    """One prompt, or the chunk of one, to compute both ways."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, tokens: int, context: int, heads: int, sizes: Sizes
    ) -> None:
        self._nope, self._rank, rotary, wide = sizes
        self._context = context
        (self._at, pages), line = some_columns([(context, tokens)], PAGE, device), self._rank + rotary

        def some(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self._cache, self._latent = some(pages, PAGE, line), some(tokens, line)
        where = torch.arange(context, context + tokens, device=device)
        self._cache[self._at.blocks[0, where // PAGE].long(), where % PAGE] = self._latent
        self._query, self._up = (
            some(tokens, heads, self._nope + rotary),
            some(heads * (self._nope + wide), self._rank) * 0.05,
        )
        by_head = self._up.view(heads, self._nope + wide, self._rank)
        self._into, self._behind = by_head[:, : self._nope], by_head[:, self._nope :]
        self._out, self._inner = some(tokens, heads, wide), some(tokens, heads, self._rank)
        self._found, self._sums = torch.empty_like(self._inner), torch.empty(tokens, heads, device=device)

    def absorbed(self, tile: PrefillTile | None) -> Tensor:
        """All of it over the cache: queries absorbed, values projected up."""
        torch.bmm(self._query[..., : self._nope].transpose(0, 1), self._into, out=self._inner.transpose(0, 1))
        prefill(self._inner, self._query, self._cache, self._at, SCALE, self._found, tile=tile)
        torch.bmm(self._found.transpose(0, 1), self._behind.transpose(1, 2), out=self._out.transpose(0, 1))
        return self._out

    def projected(self, tile: PrefillTile | None) -> Tensor:
        """This step's tokens, and those of earlier steps, projected up."""
        up, prior = F.linear(self._latent[:, : self._rank], self._up), None
        if self._context:
            prior = torch.zeros_like(self._out, dtype=torch.float32), torch.full_like(self._sums, -torch.inf)
            lines = self._cache.index_select(0, self._at.blocks[0, : self._context // PAGE]).flatten(0, 1)
            see_context(self._query, lines, F.linear(lines[:, : self._rank], self._up), SCALE, prior)
        dense(self._query, self._latent, up, self._at, SCALE, self._out, prior=prior, tile=tile)
        return self._out

    def expected(self) -> Tensor:
        inner = torch.einsum("thn,hnr->thr", self._query[..., : self._nope].float(), self._into.float())
        found, _ = absorbed_attention(inner, self._query[..., self._nope :], self._cache, self._at, SCALE)
        return torch.einsum("thr,hwr->thw", found, self._behind.float())


def _prompt(
    way: str, dtype: torch.dtype, device: torch.device, tokens: int, context: int, heads: int, sizes: Sizes = DEEPSEEK,
    tile: Tile = (),
) -> Launch:  # fmt: skip
    prompt = _Prompt(dtype, device, tokens, context, heads, sizes)
    run, (nope, _, rotary, wide) = getattr(prompt, way), sizes
    flop = 2.0 * heads * (nope + rotary + wide) * tokens * (context + tokens / 2)  # with all projected up: the fewest
    return Launch(lambda: run(PrefillTile(*tile) if tile else None), prompt.expected, num_flop=flop)


def _decode_tiles(case: Case) -> list[Tile]:
    return [(per, tile) for per in PER_MULTIPROCESSOR for tile in (FEW_HEADS if case[2] <= 16 else MANY_HEADS)]


SMALL: Sizes = (16, 80, 32, 32)
ALL_DECODES: list[Case] = [(*case, heads) for heads in HEADS for case in DECODES]
ALL_PROMPTS: list[Case] = [(*case, heads) for heads in HEADS for case in PROMPTS]
TUNED: list[Case] = [(*case, heads) for heads in HEADS for case in TUNED_PROMPTS]
OPS = (
    Op(
        "decode", _decode, [(2, 37, 6, SMALL), (5, 70, 16, (8, 64, 16, 16))], ALL_DECODES, near=2, candidates=_decode_tiles,
        tuned=[(*case, heads) for heads, cases in TUNED_DECODES.items() for case in cases],
    ),
    Op(
        "verify", _verify, [(3, 2, 37, 6, SMALL), (4, 3, 70, 16, (8, 64, 16, 16))],
        [(*case, heads) for heads in HEADS for case in VERIFIED], near=2,
    ),
    Op(
        "absorbed", partial(_prompt, "absorbed"), [(22, 0, 6, SMALL), (19, 21, 6, SMALL)], ALL_PROMPTS, near=4,
        candidates=lambda case: ABSORBED, tuned=TUNED,
    ),
    Op(
        "projected", partial(_prompt, "projected"), [(22, 0, 6, SMALL), (19, 32, 6, SMALL)], ALL_PROMPTS, near=4,
        candidates=lambda case: PROJECTED, tuned=TUNED,
    ),
)  # fmt: skip
