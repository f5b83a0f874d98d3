"""Latent attention against its reference: cache writes, decodes, prompts and chunks, at odd lengths and shapes."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU, near

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.mla import cache as caching
from meshlm.kernels.mla import reference
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.dense import context as see_context
from meshlm.kernels.mla.dense import dense, supported
from meshlm.kernels.mla.prefill import prefill
from meshlm.kernels.mla.table import decode_entries
from meshlm.kernels.mla.tiles import DecodeTile, PrefillTile, decode_tile_of, splits_of

pytestmark = MARKS
PAGE = 16
SHAPES = [(6, 8, 64, 16), (16, 16, 80, 32), (20, 16, 32, 16)]  # heads, nope, rank, rotary
if ON_GPU:
    SHAPES += [(16, 128, 512, 64), (128, 128, 512, 64)]
# The interpreter takes a second for one: there float32 has all shapes, and float16, whose order of work is the same, one.
CASES = [
    (shape, dtype) for shape in SHAPES for dtype in DTYPES if ON_GPU or dtype == torch.float32 or shape is SHAPES[1]
]


class Step:
    """Requests (start, count), the cache with their lines, and random queries; every block table is a random permutation."""

    def __init__(self, requests: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        heads, nope, rank, rotary = shape
        pages = [-(-(start + count) // PAGE) for start, count in requests]
        total = sum(pages) + 3
        order, blocks = torch.randperm(total).int(), torch.zeros(len(requests) + 2, max(pages) + 1, dtype=torch.int32)
        rows = torch.randperm(len(requests) + 2)[: len(requests)].int()
        at = 0
        for row, need in zip(rows.tolist(), pages, strict=True):
            blocks[row, :need] = order[at : at + need]
            at += need
        starts = torch.tensor([start for start, _ in requests], dtype=torch.int32)
        ends = torch.tensor([count for _, count in requests]).cumsum(0).int()
        self.at = Columns(rows.to(DEVICE), starts.to(DEVICE), ends.to(DEVICE), len(requests), blocks.to(DEVICE))
        self.cache = torch.randn(total, PAGE, rank + rotary, device=DEVICE).to(dtype)
        tokens = int(ends[-1])
        wide = heads * (nope + rotary)
        self.both = torch.randn(tokens, wide + rank + rotary, device=DEVICE).to(
            dtype
        )  # as projected: lines are strided
        self.query = self.both[:, :wide].unflatten(1, (heads, nope + rotary))
        self.latent = self.both[:, wide:]
        self.absorbed = torch.randn(tokens, heads, rank, device=DEVICE).to(dtype)
        self.scale, self.rotary = (rank + rotary) ** -0.5, rotary

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Position and slot of each token."""
        positions, slots, begin = [], [], 0
        for row, start, end in zip(self.at.rows.tolist(), self.at.starts.tolist(), self.at.ends.tolist(), strict=True):
            where = torch.arange(start, start + end - begin, device=DEVICE)
            positions.append(where)
            slots.append(self.at.blocks[row, where // PAGE].long() * PAGE + where % PAGE)
            begin = end
        return torch.cat(positions), torch.cat(slots)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.absorbed_attention(
            self.absorbed, self.query[..., -self.rotary :], self.cache, self.at, self.scale
        )


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_cache_writes(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    step = Step([(0, 5), (17, 1), (30, 4)], shape, dtype)
    positions, slots = step.places()
    slots[2] = -1
    table = torch.randn(64, shape[3], device=DEVICE)
    norm = (torch.randn(shape[2], device=DEVICE).to(dtype), 1e-6)
    theirs, theirs_cache = step.both.clone(), step.cache.clone()
    wide = shape[0] * (shape[1] + shape[3])
    query = theirs[:, :wide].unflatten(1, (shape[0], -1))
    reference.latent_cache(query, theirs[:, wide:], positions, slots, table, norm, theirs_cache)
    caching.latent_cache(step.query, step.latent, positions, slots, table, norm, step.cache)
    near(step.both, theirs, dtype, 4)
    near(step.cache, theirs_cache, dtype, 4)


TILES = [
    DecodeTile(1, 16, 4, 2),
    DecodeTile(4, 16, 4, 3),
    DecodeTile(4, 32, 4, 2, of_lines=True),
    DecodeTile(3, 16, 4, 2, 32),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_decode(shape: tuple[int, int, int, int], tile: DecodeTile, dtype: torch.dtype) -> None:
    """Contexts that no tile divides, of one token, and of fewer tiles than there are splits; a prompt in between is left alone."""
    step = Step([(0, 1), (36, 1), (4, 3), (50, 1), (63, 1)], shape, dtype)
    heads, _, rank, _ = shape
    out = torch.full_like(step.absorbed, torch.nan)
    workspace = (
        torch.full((5, heads, tile.splits, rank), torch.nan, device=DEVICE),
        torch.full((5, heads, tile.splits, 2), torch.nan, device=DEVICE),
    )
    decode(step.absorbed, step.query, step.cache, step.at, step.scale, out, workspace, tile)
    decodes = [0, 1, 5, 6]
    near(out[decodes], step.expected()[0][decodes], dtype, 2)
    assert bool(out[2:5].isnan().all())


QUERIES = 4
VERIFIED = [(0, 3), (36, 1), (17, 0), (50, 4), (30, 3), (63, 2)]  # start and tokens


@pytest.mark.parametrize("tile", [*TILES[1:3], DecodeTile(1, 16, 4, 2, 32), DecodeTile(3, 16, 8, 2, 64)])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_verify(shape: tuple[int, int, int, int], tile: DecodeTile, dtype: torch.dtype) -> None:
    """Any mix of tokens of a request, each of which sees those before it; tiles whose heads are of two tokens."""
    step = Step(VERIFIED, shape, dtype)
    tokens, heads, rank = step.absorbed.shape
    out = torch.full_like(step.absorbed, torch.nan)
    workspace = (
        torch.full((tokens * heads * tile.splits * rank,), torch.nan, device=DEVICE),
        torch.full((tokens * heads * tile.splits * 2,), torch.nan, device=DEVICE),
    )
    decode(step.absorbed, step.query, step.cache, step.at, step.scale, out, workspace, tile, queries=QUERIES)
    near(out, step.expected()[0], dtype, 2)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_prefill(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    step = Step([(0, 1), (37, 1), (0, 26), (20, 17), (64, 3)], shape, dtype)
    out = torch.full_like(step.absorbed, torch.nan)
    prefill(step.absorbed, step.query, step.cache, step.at, step.scale, out, skip=2, tile=PrefillTile(32, 16, 4, 2))
    near(out[2:], step.expected()[0][2:], dtype, 2)
    assert bool(out[:2].isnan().all())
    out.fill_(torch.nan)
    prefill(step.absorbed, step.query, step.cache, step.at, step.scale, out, fewest=2, tile=PrefillTile(64, 16, 4, 2))
    near(out[2:], step.expected()[0][2:], dtype, 2)
    assert bool(out[:2].isnan().all())


@pytest.mark.parametrize("earlier", ["nothing", "absorbed", "projected"])
@pytest.mark.parametrize(("shape", "dtype"), [case for case in CASES if case[0][1] >= 16])
def test_prompts_projected_up(shape: tuple[int, int, int, int], earlier: str, dtype: torch.dtype) -> None:
    """As absorbed attention finds it, with lines of earlier steps from their pages."""
    heads, nope, rank, rotary = shape
    wide = 32
    requests = [(5, 1), (0, 22), (21, 19), (33, 3)] if earlier != "nothing" else [(0, 1), (0, 22), (0, 19), (0, 3)]
    step = Step(requests, shape, dtype)
    step.latent.mul_(0.5)
    step.cache.mul_(0.5)
    step.cache.view(-1, rank + rotary)[step.places()[1]] = step.latent
    weights = (torch.randn(heads, nope + wide, rank, device=DEVICE) * rank**-0.5).to(dtype)
    into, behind = weights[:, :nope], weights[:, nope:]
    step.absorbed = torch.einsum("thn,hnr->thr", step.query[..., :nope], into).contiguous()
    found, _ = step.expected()
    expected = torch.einsum("thr,hwr->thw", found, behind.float())
    up = step.latent[:, :rank] @ weights.flatten(0, 1).T
    assert supported(step.query, step.latent, weights.flatten(0, 1), wide)
    prior = None
    if earlier == "projected":
        prior = (
            torch.zeros(len(up), heads, wide, device=DEVICE),
            torch.full((len(up), heads), -torch.inf, device=DEVICE),
        )
        for row, (start, count), end in zip(step.at.rows.tolist(), requests, step.at.ends.tolist(), strict=True):
            own = slice(end - count, end)
            for begin in range(0, start, PAGE):  # a page at a time
                lines = step.cache[step.at.blocks[row, begin // PAGE]][: start - begin]
                projected = lines[:, :rank] @ weights.flatten(0, 1).T
                seen = (prior[0][own], prior[1][own])
                see_context(step.query[own], lines, projected, step.scale, seen, PrefillTile(16, 16, 4, 2))
    if earlier == "absorbed":
        context, sums = torch.zeros_like(step.absorbed), torch.zeros(step.absorbed.shape[:2], device=DEVICE)
        prefill(
            step.absorbed, step.query, step.cache, step.at, step.scale, context, skip=1, context=sums,
            tile=PrefillTile(32, 16, 4, 2),
        )  # fmt: skip
        prior = torch.einsum("thr,hwr->thw", context, behind).contiguous(), sums
    out = torch.zeros(step.query.shape[0], heads, wide, device=DEVICE, dtype=dtype)
    dense(step.query, step.latent, up, step.at, step.scale, out, 1, prior=prior, tile=PrefillTile(16, 16, 4, 2))
    near(out[1:], expected[1:], dtype, 4)


def test_decode_tiles_fill_the_gpu_with_equal_shares() -> None:
    assert [splits_of(programs, 264) for programs in (1, 2, 32, 48, 64, 100, 132, 256, 300, 2000)] == [
        64,
        64,
        8,
        5,
        4,
        5,
        2,
        1,
        3,
        1,
    ]
    entry = {"programs_per_multiprocessor": 2.0, "block_n": 32, "warps": 4, "stages": 3, "of_lines": False}
    lone = entry | {"heads_to": 16, "splits_from": 32, "block_n": 16}
    table = {"decode": [lone, entry | {"heads_to": 16}, entry | {"heads_to": 64, "block_n": 64}]}
    assert decode_tile_of(table, 32, 16, 132) == DecodeTile(8, 32, 4, 3, 16)
    assert decode_tile_of(table, 1, 8, 132).block_n == 16
    assert decode_tile_of(table, 32, 128, 132) == DecodeTile(4, 64, 4, 3, 64)


def test_the_table_has_a_tile_for_lone_requests_and_one_for_many() -> None:
    """What `tune` makes of its times is what `decode_tile` finds."""
    lone, many = (1.0, (64, 4, 2, True)), (2.0, (64, 4, 3, False))
    times = {(n, 4096, 16): {lone: 10.0, many: 12.0} for n in (1, 8)} | {(64, 4096, 16): {lone: 113.0, many: 88.0}}
    table = {
        "decode": decode_entries(16, times, 132)
        + decode_entries(128, {(1, 9, 128): {lone: 2.0}, (64, 9, 128): {many: 1.0}}, 132)
    }
    assert decode_tile_of(table, 1, 16, 132) == DecodeTile(64, 64, 4, 2, of_lines=True)
    assert decode_tile_of(table, 8, 16, 132) == DecodeTile(16, 64, 4, 2, of_lines=True)
    assert decode_tile_of(table, 64, 16, 132) == DecodeTile(4, 64, 4, 3)
    assert decode_tile_of(table, 1, 128, 132).block_h == decode_tile_of(table, 64, 128, 132).block_h == 64
