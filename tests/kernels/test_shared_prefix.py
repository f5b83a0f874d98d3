"""Decodes that read shared prefixes together, against the reference, which knows nothing of that."""

import pytest
import torch
from device import DEVICE, MARKS, ON_GPU, WIDE, near, needs_fp8
from paged import PAGE, make, share

from meshlm.kernels import float8
from meshlm.kernels.attention.decode import decode
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras, SharedPrefixes
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.shared_prefix import shared_prefix
from meshlm.kernels.attention.tiles import shared_tile, tile_of_head

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


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="many requests, and CUDA graphs")
@pytest.mark.parametrize(
    ("shape", "tile"), [((32, 8, 128), 16), ((16, 8, 128), 32), ((32, 4, 128), 8), ((8, 4, 256), 32)]
)
def test_many_requests_and_a_graph(shape: tuple[int, int, int], tile: int) -> None:
    """What decodes give that share nothing; a graph then takes steps whose clusters are others, or none."""
    heads, kv_heads, dim = shape
    n, splits = 64, 2
    query, keys, values, at = make(decodes(*range(2100, 2100 + n)), *shape, torch.bfloat16)
    clusters = [(list(range(40)), 2048), (list(range(43, 60)), 384)]
    shared = share(keys, values, at, clusters, tile, 256)
    keys.nan_to_num_(0.0)  # what nobody reads
    values.nan_to_num_(0.0)
    block_n, warps, stages = shared_tile(dim)
    _, plain_n, plain_warps, plain_stages = tile_of_head((splits, 32, 2, 2), dim)
    slots = shared.slots(splits)
    workspace = (
        torch.empty(n * heads * slots * dim, device=DEVICE),
        torch.empty(n * heads * slots * 2, device=DEVICE),
        torch.zeros(n * kv_heads, dtype=torch.int32, device=DEVICE),
    )
    found, plain = torch.empty_like(query), torch.empty_like(query)

    def by(out: torch.Tensor, prefixes: SharedPrefixes | None) -> None:
        if prefixes is not None:
            shared_prefix(
                query, keys, values, at, prefixes, 0.1, workspace, splits, block_n=block_n, warps=warps, stages=stages
            )
        decode(
            query, keys, values, at, 0.1, out, workspace, splits, shared=prefixes,
            block_n=plain_n, warps=plain_warps, stages=plain_stages,
        )  # fmt: skip

    by(plain, None)
    by(found, shared)
    near(found, plain, torch.bfloat16)
    near(found, attention(query, keys, values, at, 0.1), torch.bfloat16, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # kernels begin while those before them end
            by(found, shared)
    others = [(list(range(60, 30, -1)), 384)]
    pages = at.blocks[at.rows[:1].long()]
    at.blocks[at.rows.long(), : 384 // PAGE] = pages[:, : 384 // PAGE]
    query.normal_()
    again = share(keys, values, at, others, tile, 128)
    keys.nan_to_num_(0.0)
    values.nan_to_num_(0.0)
    for plan in (again, None):
        for name in ("items", "members", "tokens", "parts"):
            column = getattr(shared, name).zero_()
            if plan is not None:
                new = getattr(plan, name)
                column[: len(new)] = new
        found.fill_(7.0)
        by(plain, None)
        graph.replay()
        near(found, plain, torch.bfloat16)
    assert not workspace[2].any()
