"""Paged attention against its reference: prompts, chunks and decodes, at odd lengths."""

from itertools import product

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU, WIDE, near, near_in_fp8, needs_fp8
from paged import PAGE, give_away, give_away_chunks, make, step_of

from meshlm.kernels import float8
from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.kernel import PLAIN, Extras
from meshlm.kernels.attention.prefill import dense, prefill
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.tiles import tile_of_head
from meshlm.kernels.rope_cache import kernel as rope_kernel
from meshlm.kernels.rope_cache.reference import rope_cache

pytestmark = MARKS
SHAPES = [(4, 2, 64), (6, 2, 64), (8, 1, 80), (2, 2, 32)]
WINDOWS = (0, 5, 40)


def workspace(n: int, heads: int, splits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.full((n, heads, splits, dim), torch.nan, device=DEVICE),
        torch.full((n, heads, splits, 2), torch.nan, device=DEVICE),
        torch.zeros(n, heads, dtype=torch.int32, device=DEVICE),
    )


def prefill_cases() -> list[tuple[tuple[int, int, int], int, bool, torch.dtype]]:
    """All of them on a GPU. The interpreter takes two seconds for one: there float32 has all, and float16, whose masks and order of
    work are the same, each shape with each source of keys, under one window after the other."""
    cases = list(product(SHAPES, WINDOWS, (False, True), DTYPES))
    if ON_GPU:
        return cases
    turns = {(shape, WINDOWS[(2 * n + dense) % 3], dense) for n, shape in enumerate(SHAPES) for dense in (False, True)}
    return [case for case in cases if case[3] == torch.float32 or case[:3] in turns]


@pytest.mark.parametrize(("shape", "window", "dense", "dtype"), prefill_cases())
def test_prefill(shape: tuple[int, int, int], window: int, dense: bool, dtype: torch.dtype) -> None:
    requests = [(0, 1), (37, 1), (0, 90), (20, 33), (64, 3), (0, 17)]
    query, keys, values, at = make(requests, *shape, dtype)
    extras = Extras(window=window)
    expected = attention(query, keys, values, at, 0.125, extras)
    qkv = step_of(keys, values, at, shape[0]) if dense else None
    out = torch.zeros_like(query)
    prefill(
        query, keys, values, at, 0.125, out, extras=extras, qkv=qkv, tiles=(32, 16, 4, 3) if dense else (16, 32, 4, 2)
    )
    near(out, expected, dtype, 2)


CHUNK_CASES = [
    ((4, 2, 64), 32, False, torch.float32),
    ((6, 2, 64), 24, True, torch.float32),
    ((8, 1, 80), 24, False, WIDE),
    ((4, 2, 64), 48, True, WIDE),
]


@pytest.mark.parametrize(("shape", "chunk", "dense", "dtype"), CHUNK_CASES)
def test_chunks(shape: tuple[int, int, int], chunk: int, dense: bool, dtype: torch.dtype) -> None:
    """Prompts and their parts within a chunk, across its end and across several; what lies before it is others'."""
    requests = [(37, 1), (0, 60), (20, 9), (47, 3), (95, 17)]
    query, keys, values, at = make(requests, *shape, dtype)
    extras = Extras(chunk=chunk)
    expected = attention(query, keys, values, at, 0.125, extras)
    qkv = step_of(keys, values, at, shape[0]) if dense else None
    give_away_chunks(keys, values, at, chunk)
    out = torch.zeros_like(query)
    prefill(query, keys, values, at, 0.125, out, extras=extras, qkv=qkv, tiles=(32, 16, 4, 2))
    near(out, expected, dtype, 2)


@pytest.mark.parametrize(
    ("splits", "chunk", "dtype"), [(1, 24, torch.float32), (4, 64, torch.float32), (4, 24, WIDE), (1, 64, WIDE)]
)
def test_a_decode_sees_its_chunk_alone(splits: int, chunk: int, dtype: torch.dtype) -> None:
    """At its first and last token, and far behind it."""
    query, keys, values, at = make([(0, 1), (23, 1), (24, 1), (63, 1), (64, 1), (203, 1)], 6, 2, 64, dtype)
    extras = Extras(chunk=chunk)
    expected = attention(query, keys, values, at, 0.125, extras)
    give_away_chunks(keys, values, at, chunk)
    out = torch.zeros_like(query)
    decode(query, keys, values, at, 0.125, out, workspace(6, 6, splits, 64), splits, extras, block_n=32)
    near(out, expected, dtype, 2)


def test_a_chunk_that_holds_all_is_full_attention() -> None:
    """At any length up to it."""
    query, keys, values, at = make([(0, 20), (30, 27), (63, 1), (12, 1)], 4, 2, 32, torch.float32)
    for chunk, qkv in ((64, None), (200, step_of(keys, values, at, 4))):
        found = [torch.zeros_like(query) for _ in range(2)]
        for out, extras in zip(found, (PLAIN, Extras(chunk=chunk)), strict=True):
            prefill(query, keys, values, at, 0.2, out, extras=extras, qkv=qkv, fewest=2, tiles=(16, 32, 4, 2))
            decode(query, keys, values, at, 0.2, out, workspace(4, 4, 2, 32), 2, extras, block_n=32)
        near(found[0], found[1], torch.float32)


@pytest.mark.parametrize("dense", [False, True])
def test_pages_before_the_window_are_not_read(dense: bool) -> None:
    """Not even with a weight of zero: they are others'."""
    extras = Extras(window=20)
    query, keys, values, at = make([(70, 1), (75, 33), (0, 50), (120, 1)], 4, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.125, extras)
    qkv = step_of(keys, values, at, 4) if dense else None
    give_away(keys, values, at, 20)
    out = torch.zeros_like(query)
    prefill(query, keys, values, at, 0.125, out, extras=extras, qkv=qkv, tiles=(16, 32, 4, 2))
    near(out, expected, torch.float32, 2)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_decode_reads_no_page_before_its_window(splits: int) -> None:
    extras = Extras(window=20)
    query, keys, values, at = make([(70, 1), (90, 1), (15, 1), (200, 1)], 4, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.125, extras)
    give_away(keys, values, at, 20)
    out = torch.zeros_like(query)
    decode(query, keys, values, at, 0.125, out, workspace(4, 4, splits, 64), splits, extras, block_n=32)
    near(out, expected, torch.float32, 2)


def test_prefill_reads_this_step_from_the_projection() -> None:
    query, keys, values, at = make([(40, 33), (0, 20)], 4, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.125)
    qkv = step_of(keys, values, at, 4)
    for row, start, count in zip(at.rows.tolist(), (40, 0), (33, 20), strict=True):
        for position in range(start, start + count):
            keys[at.blocks[row, position // PAGE], position % PAGE] = torch.nan
    out = torch.zeros_like(query)
    prefill(query, keys, values, at, 0.125, out, qkv=qkv, tiles=(16, 32, 4, 2))
    near(out, expected, torch.float32, 2)


def test_what_is_in_padding_reaches_no_prompt() -> None:
    """A mixed graph's lines behind the last request: nobody computes attention there, so they hold what the memory held."""
    requests, heads, kv_heads, dim = [(0, 1), (16, 21)], 4, 2, 64
    _, keys, values, at = make(requests, heads, kv_heads, dim, torch.float32)
    tokens, padded = int(at.ends[-1]), 48
    qkv = torch.randn(padded, (heads + 2 * kv_heads) * dim, device=DEVICE)
    positions = torch.cat([torch.arange(start, start + count) for start, count in requests]).to(DEVICE)
    rows = torch.cat([at.rows[n : n + 1].repeat(count) for n, (_, count) in enumerate(requests)]).long()
    slots = at.blocks[rows, positions // PAGE].long() * PAGE + positions % PAGE
    table = torch.cat((torch.ones(64, dim // 2), torch.zeros(64, dim // 2)), 1).to(DEVICE)
    found = []
    for lines in (tokens, padded):
        step = qkv[:lines].clone()
        step[tokens:] = torch.nan
        more = torch.zeros(lines - tokens, dtype=torch.int64, device=DEVICE)
        where = (torch.cat((positions, more)), torch.cat((slots, more - 1)))
        query = rope_kernel.rope_cache(step, *where, table, None, 0.0, keys, values, heads)
        out = torch.zeros_like(query)
        prefill(query, keys, values, at, 0.125, out, qkv=step, tiles=(16, 32, 4, 2))
        found.append(out[:tokens])
    assert torch.equal(*found)


def test_prefill_after_decodes_leaves_them_alone() -> None:
    requests = [(9, 1), (37, 1), (30, 1), (0, 21), (8, 9)]
    query, keys, values, at = make(requests, 4, 2, 64, torch.float32)
    out = torch.full_like(query, 7.0)
    prefill(query, keys, values, at, 0.125, out, skip=3, tiles=(16, 32, 4, 2))
    assert (out[:3] == 7.0).all()
    near(out[3:], attention(query, keys, values, at, 0.125)[3:], torch.float32, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [0, 20])
def test_decode(shape: tuple[int, int, int], splits: int, window: int, dtype: torch.dtype) -> None:
    requests = [(0, 1), (15, 1), (16, 1), (99, 1), (200, 1)]
    query, keys, values, at = make(requests, *shape, dtype)
    at.ends = torch.cat((at.ends, at.ends[-1:]))  # one request of padding
    at.rows, at.starts = torch.cat((at.rows, at.rows[:1])), torch.cat((at.starts, at.starts[:1]))
    at.n += 1
    heads, _, dim = shape
    scratch = workspace(6, heads, splits, dim)
    out = torch.full((6, heads, dim), 7.0, device=DEVICE, dtype=dtype)
    extras = Extras(window=window)
    decode(query, keys, values, at, 0.125, out, scratch, splits, extras, block_n=32)
    at.n -= 1
    near(out[:5], attention(query, keys, values, at, 0.125, extras), dtype, 2)
    assert (out[5] == 7.0).all()


@pytest.mark.parametrize(("shape", "dtype"), [((8, 1, 512), WIDE), ((2, 2, 512), torch.float32), ((3, 1, 320), WIDE)])
def test_large_heads(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """With the tiles that they get, whatever a table says; keys are never read from the projection."""
    heads, _, dim = shape
    query, keys, values, at = make([(0, 1), (37, 1), (0, 21), (30, 9)], *shape, dtype)
    expected = attention(query, keys, values, at, 0.05)
    out = torch.zeros_like(query)
    tiles, qkv = tile_of_head((64, 64, 4, 3), dim), step_of(keys, values, at, heads)
    assert not dense(dim, torch.device(DEVICE))
    prefill(query, keys, values, at, 0.05, out, qkv=qkv, tiles=tiles)
    near(out, expected, dtype, 2)
    for parts in (1, 4):
        splits, block_n, warps, stages = tile_of_head((parts, 64, 2, 2), dim)
        out = torch.zeros_like(query)
        scratch = workspace(4, heads, splits, dim)
        decode(
            query, keys, values, at, 0.05, out, scratch, splits, block_n=block_n, warps=warps, stages=stages
        )  # fmt: skip
        near(out[:2], expected[:2], dtype, 2)


@pytest.mark.parametrize("splits", [1, 2])
def test_soft_cap_and_sinks(splits: int) -> None:
    sinks = torch.randn(4, device=DEVICE)
    extras = Extras(cap=2.0, sinks=sinks)
    query, keys, values, at = make([(0, 1), (45, 1), (70, 1)], 4, 2, 64, torch.float32)
    out = torch.empty_like(query)
    expected = attention(query, keys, values, at, 0.5, extras)
    for qkv in (None, step_of(keys, values, at, 4)):
        prefill(query, keys, values, at, 0.5, out, extras=extras, qkv=qkv, tiles=(16, 32, 4, 2))
        near(out, expected, torch.float32, 2)
    scratch = workspace(3, 4, splits, 64)
    decode(query, keys, values, at, 0.5, out, scratch, splits, extras, block_n=32)
    near(out, expected, torch.float32, 2)
    assert not torch.allclose(expected, attention(query, keys, values, at, 0.5, PLAIN))


@pytest.mark.parametrize("splits", [1, 4])
def test_windows_with_sinks(splits: int) -> None:
    """Heads as gpt-oss has them: eight of queries for one of keys, a window that begins within a page, contexts around it."""
    extras = Extras(window=40, sinks=torch.randn(16, device=DEVICE))
    query, keys, values, at = make([(0, 1), (39, 1), (40, 1), (201, 1)], 16, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.125, extras)
    out = torch.empty_like(query)
    prefill(query, keys, values, at, 0.125, out, extras=extras, tiles=(16, 32, 4, 2))
    near(out, expected, torch.float32, 2)
    decode(query, keys, values, at, 0.125, out, workspace(4, 16, splits, 64), splits, extras, block_n=16)
    near(out, expected, torch.float32, 2)


ROTATED = [
    *product([(4, 2, 64), (3, 1, 80)], [1, 4], [False, True], DTYPES),
    ((8, 1, 512), 4, True, WIDE),
    ((3, 1, 512), 1, True, torch.float32),
]


@pytest.mark.parametrize(("shape", "splits", "normed", "dtype"), ROTATED)
def test_decode_that_rotates_itself(shape: tuple[int, int, int], splits: int, normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    requests = [(0, 1), (31, 1), (16, 1), (99, 1)]
    _, keys, values, at = make(requests, heads, kv_heads, dim, dtype)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    rotary = dim - 16
    angles = torch.outer(torch.arange(128.0), 1.0 / 10000 ** (torch.arange(0, rotary, 2) / rotary)).to(DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    norms = tuple(torch.rand(2, dim, device=DEVICE).to(dtype) + 0.5) if normed else None
    positions = at.starts.long()
    slots = at.blocks[at.rows.long(), positions // PAGE].long() * PAGE + positions % PAGE
    expected_keys, expected_values = keys.clone(), values.clone()
    query = rope_cache(qkv.clone(), positions, slots, table, norms, 1e-6, expected_keys, expected_values, heads)
    expected = attention(query, expected_keys, expected_values, at, 0.125)
    out = torch.empty(4, heads, dim, device=DEVICE, dtype=dtype)
    scratch = workspace(4, heads, splits, dim)
    rope = Rope(table, norms, 1e-6, heads)
    _, block_n, warps, stages = tile_of_head((splits, 32, 2, 2), dim)
    decode(
        qkv, keys, values, at, 0.125, out, scratch, splits, rope=rope, block_n=block_n, warps=warps, stages=stages
    )  # fmt: skip
    near(keys, expected_keys, dtype)
    assert torch.equal(values, expected_values)
    near(out, expected, dtype, 2)
    assert not scratch[2].any()


SLOPE_CASES = [((6, 2, 64), 0.0, 1, torch.float32), ((3, 1, 80), 2.0, 4, torch.float32), ((4, 4, 32), 0.0, 4, WIDE)]


@pytest.mark.parametrize(("shape", "cap", "splits", "dtype"), SLOPE_CASES)
def test_slopes(shape: tuple[int, int, int], cap: float, splits: int, dtype: torch.dtype) -> None:
    """Of each head its own, by the distance of key and query, behind the soft cap; also over keys from the projection."""
    query, keys, values, at = make([(0, 1), (45, 1), (0, 21), (38, 9)], *shape, dtype)
    extras = Extras(cap=cap, slopes=0.7 ** torch.arange(1.0, shape[0] + 1, device=DEVICE))
    expected = attention(query, keys, values, at, 0.125, extras)
    for qkv in (None, step_of(keys, values, at, shape[0])):
        out = torch.zeros_like(query)
        prefill(query, keys, values, at, 0.125, out, extras=extras, qkv=qkv, tiles=(16, 16, 4, 2))
        near(out, expected, dtype, 2)
    out = torch.zeros_like(query)
    decode(query, keys, values, at, 0.125, out, workspace(4, shape[0], splits, shape[2]), splits, extras, block_n=16)
    near(out[:2], expected[:2], dtype, 2)


FP8 = Extras(k_scale=0.5, v_scale=0.25)


KINDS = [(1, torch.float8_e4m3fn), (4, torch.float8_e4m3fn), (4, torch.float8_e5m2)]


def in_fp8(keys: torch.Tensor, values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return float8.stored(keys, FP8.k_scale, kind), float8.stored(values, FP8.v_scale, kind)


@needs_fp8
@pytest.mark.parametrize(("splits", "kind"), KINDS)
def test_an_fp8_cache_is_read(splits: int, kind: torch.dtype) -> None:
    query, keys, values, at = make([(31, 1), (99, 1), (0, 1), (0, 40), (17, 20)], 4, 2, 64, WIDE)
    keys, values = in_fp8(keys, values, kind)
    expected = attention(query, keys, values, at, 0.125, FP8)
    out = torch.empty_like(query)
    prefill(query, keys, values, at, 0.125, out, extras=FP8, fewest=2, tiles=(16, 32, 4, 2))
    decode(query, keys, values, at, 0.125, out, workspace(5, 4, splits, 64), splits, FP8, block_n=32)
    near(out, expected, WIDE, 2)


@needs_fp8
@pytest.mark.parametrize(("splits", "kind"), KINDS)
def test_a_decode_writes_its_own_key_to_an_fp8_cache(splits: int, kind: torch.dtype) -> None:
    """Divided by the scale, and no larger than the format can hold."""
    heads, kv_heads, dim = 4, 2, 64
    _, keys, values, at = make([(0, 1), (31, 1), (16, 1)], heads, kv_heads, dim, WIDE)
    keys, values = in_fp8(keys, values, kind)
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, device=DEVICE).to(WIDE)
    qkv[1, heads:, 3] = 3000.0
    angles = torch.outer(torch.arange(128.0), 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)).to(DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = at.starts.long()
    slots = at.blocks[at.rows.long(), positions // PAGE].long() * PAGE + positions % PAGE
    wanted = keys.clone(), values.clone()
    query = rope_cache(
        qkv.view(3, -1).clone(), positions, slots, table, None, 0.0, *wanted, heads, FP8.k_scale, FP8.v_scale
    )
    out = torch.empty(3, heads, dim, device=DEVICE, dtype=WIDE)
    rope = Rope(table, None, 0.0, heads)
    decode(qkv.view(3, -1), keys, values, at, 0.125, out, workspace(3, heads, splits, dim), splits, FP8, rope)
    near_in_fp8(keys, wanted[0])
    near_in_fp8(values, wanted[1])
    assert float(values.float().abs().max()) == (448.0 if kind == torch.float8_e4m3fn else 12288.0)
    near(out, attention(query, keys, values, at, 0.125, FP8), WIDE, 2)
