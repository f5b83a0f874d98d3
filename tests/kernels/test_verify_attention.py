"""Attention of requests with a few new tokens each, against the reference: any mix of their numbers, and of contexts."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, WIDE, near, needs_fp8
from paged import give_away, give_away_chunks, make

from meshlm.kernels import float8
from meshlm.kernels.attention.decode import decode
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.tiles import VerifyTile, verify_lines
from meshlm.kernels.attention.verify import verify

pytestmark = MARKS
QUERIES = 5
# (start, tokens): contexts of one token, of fewer tiles than there are splits and of many; some end with a tile; one has no tokens
REQUESTS = [(0, 3), (37, 1), (16, 0), (60, 5), (15, 4), (0, 1), (28, 4), (200, 2)]


def verified(
    query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], at: Columns, scale: float, tile: VerifyTile,
    extras: Extras = PLAIN, queries: int = QUERIES,
) -> torch.Tensor:  # fmt: skip
    """What the kernels find; behind the last token's line its 7 stays."""
    tokens, heads, dim = query.shape
    parts, sums = (
        torch.full((tokens * heads * tile.splits * size,), torch.nan, device=DEVICE) for size in (dim, 2)
    )  # fmt: skip
    out = torch.full((tokens + 1, heads, dim), 7.0, device=DEVICE, dtype=query.dtype)
    verify(query, *cache, at, scale, out, (parts, sums), queries, tile, extras)
    assert (out[tokens:] == 7.0).all()
    return out[:tokens]


SHAPES = [
    ((4, 2, 64), 64),
    ((6, 2, 80), 16),  # three query heads: the second query's are in two tiles
    ((3, 3, 32), 16),
    ((8, 1, 128), 64),
    ((2, 1, 256), 16),
]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("shape", "lines", "dtype"), [(*one, dtype) for one in SHAPES for dtype in DTYPES])
def test_any_mix_of_tokens(shape: tuple[int, int, int], lines: int, splits: int, dtype: torch.dtype) -> None:
    query, keys, values, at = make(REQUESTS, *shape, dtype)
    expected = attention(query, keys, values, at, 0.125)
    found = verified(query, (keys, values), at, 0.125, VerifyTile(lines, splits, 16, 4, 2))
    near(found, expected, dtype, 2)


@pytest.mark.parametrize("splits", [1, 2])
def test_entries_behind_the_last_request_have_no_tokens(splits: int) -> None:
    """Of a row that is nobody's."""
    query, keys, values, at = make([(9, 2), (50, 3)], 4, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.125)
    nobody = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    rows, starts, ends = (torch.cat(both) for both in ((at.rows, nobody), (at.starts, nobody), (at.ends, nobody + 5)))
    wide = Columns(rows, starts, ends, 5, at.blocks)
    near(verified(query, (keys, values), wide, 0.125, VerifyTile(32, splits, 32, 4, 2)), expected, torch.float32, 2)


@pytest.mark.parametrize(("group", "queries"), [(1, 16), (8, 16), (4, 2)])
def test_as_many_tokens_as_there_may_be(group: int, queries: int) -> None:
    """16 tokens of eight heads are as many lines as a tile may have; what has fewer leaves its last tiles empty."""
    query, keys, values, at = make([(70, queries), (3, 1), (0, queries)], group, 1, 32, torch.float32)
    expected = attention(query, keys, values, at, 0.2)
    for lines in {16, verify_lines(group * queries, 32)}:
        tile = VerifyTile(lines, 2, 32, 4, 2)
        near(verified(query, (keys, values), at, 0.2, tile, queries=queries), expected, torch.float32, 2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("extras", [Extras(window=20), Extras(window=3), Extras(chunk=24), Extras(chunk=32)])
def test_windows_and_chunks(extras: Extras, splits: int) -> None:
    """Each token has its own; a window may begin among the drafts, a chunk between two of them. What lies before is others'."""
    requests = [(70, 4), (21, 5), (0, 2), (47, 3), (203, 1), (30, 4)]
    query, keys, values, at = make(requests, 6, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.125, extras)
    if extras.chunk:
        give_away_chunks(keys, values, at, extras.chunk)
    else:
        give_away(keys, values, at, extras.window)
    found = verified(query, (keys, values), at, 0.125, VerifyTile(16, splits, 16, 4, 2), extras)
    near(found, expected, torch.float32, 2)


EXTRAS = [
    Extras(cap=2.0),
    Extras(sinks=torch.linspace(-1.0, 3.0, 6, device=DEVICE)),
    Extras(slopes=0.7 ** torch.arange(1.0, 7, device=DEVICE)),
    Extras(40, 3.0, torch.ones(6, device=DEVICE), slopes=0.9 ** torch.arange(1.0, 7, device=DEVICE)),
]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("extras", EXTRAS, ids=["cap", "sinks", "slopes", "all"])
def test_caps_sinks_and_slopes(extras: Extras, splits: int) -> None:
    query, keys, values, at = make(REQUESTS, 6, 2, 64, torch.float32)
    expected = attention(query, keys, values, at, 0.5, extras)
    found = verified(query, (keys, values), at, 0.5, VerifyTile(16, splits, 32, 4, 2), extras)
    near(found, expected, torch.float32, 2)


@needs_fp8
@pytest.mark.parametrize(
    ("splits", "kind"), [(1, torch.float8_e4m3fn), (4, torch.float8_e4m3fn), (4, torch.float8_e5m2)]
)
def test_an_fp8_cache(splits: int, kind: torch.dtype) -> None:
    extras = Extras(k_scale=0.5, v_scale=0.25)
    query, keys, values, at = make(REQUESTS, 4, 2, 64, WIDE)
    keys, values = float8.stored(keys, extras.k_scale, kind), float8.stored(values, extras.v_scale, kind)
    expected = attention(query, keys, values, at, 0.125, extras)
    found = verified(query, (keys, values), at, 0.125, VerifyTile(16, splits, 32, 4, 2), extras)
    near(found, expected, WIDE, 2)


def test_one_token_each_is_a_decode() -> None:
    query, keys, values, at = make([(0, 1), (99, 1), (31, 1)], 8, 2, 64, torch.float32)
    out, room = torch.empty_like(query), [torch.empty(3 * 8 * 2 * size, device=DEVICE) for size in (64, 2)]
    counters = torch.zeros(3 * 2, dtype=torch.int32, device=DEVICE)
    decode(query, keys, values, at, 0.125, out, (room[0], room[1], counters), 2, block_n=32)
    near(verified(query, (keys, values), at, 0.125, VerifyTile(16, 2, 32, 2, 2)), out, torch.float32)
