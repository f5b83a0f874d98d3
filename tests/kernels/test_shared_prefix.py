"""Decodes that read shared prefixes together, against the reference, which knows nothing of that."""

import pytest
import torch
from device import DEVICE, MARKS, WIDE, near, needs_fp8
from paged import make, share

from meshlm.kernels import float8
from meshlm.kernels.attention.decode import decode
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras, SharedPrefixes
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.shared_prefix import shared_prefix

pytestmark = MARKS
Cluster = tuple[list[int], int]


def both(
    query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], at: Columns, shared: SharedPrefixes, scale: float,
    splits: int, extras: Extras = PLAIN, block_n: int = 32,
) -> torch.Tensor:  # fmt: skip
    """Both kernels; what is no decode keeps its 7."""
    keys, values = cache
    (_, heads, dim), kv_heads, slots = query.shape, keys.shape[2], shared.slots(splits)
    workspace = (
        torch.full((at.n * heads * slots * dim,), torch.nan, device=DEVICE),
        torch.full((at.n * heads * slots * 2,), torch.nan, device=DEVICE),
        torch.zeros(at.n * kv_heads, dtype=torch.int32, device=DEVICE),
    )
    out = torch.full_like(query, 7.0)
    shared_prefix(query, keys, values, at, shared, scale, workspace, splits, extras, block_n=64)
    decode(query, keys, values, at, scale, out, workspace, splits, extras, shared=shared, block_n=block_n)
    assert not workspace[2].any()
    return out


def decodes(*starts: int) -> list[tuple[int, int]]:
    return [(start, 1) for start in starts]


SHAPES = [(4, 2, 64), (6, 2, 64), (2, 2, 128), (8, 1, 96), (8, 2, 80)]


@pytest.mark.parametrize(("shape", "dtype"), [(shape, torch.float32) for shape in SHAPES] + [((8, 1, 64), WIDE)])
@pytest.mark.parametrize(("splits", "piece"), [(1, 256), (4, 128)])
def test_clusters_and_loners(shape: tuple[int, int, int], dtype: torch.dtype, splits: int, piece: int) -> None:
    """Two clusters, one of which fills no tile and one more than one; one request begins right behind its prefix."""
    query, keys, values, at = make(decodes(300, 20, 256, 131, 270, 0, 200, 290), *shape, dtype)
    shared = share(keys, values, at, [([0, 2, 7, 4], 256), ([6, 3], 128)], 3, piece)
    expected = attention(query, keys, values, at, 0.125)
    near(both(query, (keys, values), at, shared, 0.125, splits), expected, dtype, 2)


@pytest.mark.parametrize(("splits", "piece"), [(1, 128), (2, 512), (8, 256), (8, 128)])
def test_any_numbers_of_parts(splits: int, piece: int) -> None:
    query, keys, values, at = make(decodes(900, 640, 641, 2000, 100), 4, 1, 32, torch.float32)
    shared = share(keys, values, at, [([0, 1, 2, 3], 640)], 4, piece)
    expected = attention(query, keys, values, at, 0.2)
    near(both(query, (keys, values), at, shared, 0.2, splits), expected, torch.float32, 2)


@pytest.mark.parametrize("splits", [1, 2])
def test_where_nobody_shares(splits: int) -> None:
    query, keys, values, at = make(decodes(45, 130, 300), 4, 2, 64, torch.float32)
    shared = share(keys, values, at, [], 4, 128)
    expected = attention(query, keys, values, at, 0.125)
    near(both(query, (keys, values), at, shared, 0.125, splits), expected, torch.float32, 2)


@pytest.mark.parametrize("splits", [1, 4])
def test_what_is_no_decode_is_left_alone(splits: int) -> None:
    """Prompts of the same step and a graph's padding."""
    requests = [(300, 1), (0, 21), (260, 1), (40, 1), (130, 2)]
    query, keys, values, at = make(requests, 4, 2, 64, torch.float32)
    shared = share(keys, values, at, [([2, 0], 256)], 8, 128)
    expected = attention(query, keys, values, at, 0.125)
    at.ends = torch.cat((at.ends, at.ends[-1:]))
    at.rows, at.starts = torch.cat((at.rows, at.rows[:1])), torch.cat((at.starts, at.starts[:1]))
    zero = shared.tokens[:1] * 0
    shared.tokens, shared.parts = torch.cat((shared.tokens, zero)), torch.cat((shared.parts, zero))
    at.n += 1
    out = both(query, (keys, values), at, shared, 0.125, splits)
    lone = [0, 22, 23]
    near(out[lone], expected[lone], torch.float32, 2)
    out[lone] = 7.0
    assert (out == 7.0).all()


EXTRAS = [
    Extras(cap=2.0),
    Extras(sinks=torch.linspace(-1.0, 3.0, 6, device=DEVICE)),
    Extras(slopes=0.7 ** torch.arange(1.0, 7, device=DEVICE)),
    Extras(cap=3.0, sinks=torch.ones(6, device=DEVICE), slopes=0.9 ** torch.arange(1.0, 7, device=DEVICE)),
]


@pytest.mark.parametrize("extras", EXTRAS, ids=["cap", "sinks", "slopes", "all"])
@pytest.mark.parametrize("splits", [1, 4])
def test_caps_sinks_and_slopes(extras: Extras, splits: int) -> None:
    query, keys, values, at = make(decodes(129, 300, 128, 50), 6, 2, 64, torch.float32)
    shared = share(keys, values, at, [([1, 0, 2], 128)], 4, 128)
    expected = attention(query, keys, values, at, 0.5, extras)
    near(both(query, (keys, values), at, shared, 0.5, splits, extras), expected, torch.float32, 2)


@needs_fp8
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache(kind: torch.dtype) -> None:
    extras = Extras(k_scale=0.5, v_scale=0.25)
    query, keys, values, at = make(decodes(140, 300, 128, 31), 4, 2, 64, WIDE)
    shared = share(keys, values, at, [([1, 0, 2], 128)], 2, 128)
    keys, values = float8.stored(keys, extras.k_scale, kind), float8.stored(values, extras.v_scale, kind)
    expected = attention(query, keys, values, at, 0.125, extras)
    near(both(query, (keys, values), at, shared, 0.125, 2, extras), expected, WIDE, 2)


@pytest.mark.parametrize("page", [8, 128, 144])
def test_pages_of_any_length(page: int) -> None:
    query, keys, values, at = make(decodes(400, 300, 290), 4, 2, 32, torch.float32, page)
    shared = share(keys, values, at, [([1, 0, 2], 144 if page == 144 else 256)], 4, 128)
    if page == 144:  # the page is the same, but whole steps of it count
        shared.tokens[:], shared.parts[:] = 128, 1
        shared.items[0, 3] = 128
        shared.items[1] = 0
    expected = attention(query, keys, values, at, 0.2)
    near(both(query, (keys, values), at, shared, 0.2, 2), expected, torch.float32, 2)
