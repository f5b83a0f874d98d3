"""Attention of prompts on Hopper against its reference: what test_attention.py asks of prefill.py, at the edges of larger tiles.

Its dialect has no interpreter, so nearly all of this is for that GPU alone.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from device import MARKS, near
from paged import give_away, make, step_of

from meshlm.kernels.attention import hopper
from meshlm.kernels.attention.kernel import PLAIN, Columns, Extras
from meshlm.kernels.attention.reference import attention
from meshlm.kernels.attention.self_test import self_test_hopper
from meshlm.kernels.attention.tiles import Variant

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
REQUESTS = [
    (0, 1),
    (37, 1),
    (0, 90),
    (20, 33),
    (64, 3),
    (0, 17),
    (300, 200),
    (513, 129),
    (128, 256),
    (1000, 5),
    (15, 300),
]
SHAPES = [
    (32, 8, 128),
    (28, 4, 128),
    (6, 2, 64),
    (8, 8, 128),
    (8, 1, 64),
]  # 28 / 4: a tile has 18 queries, and two rows more
ODD_SHAPES = [
    (4, 2, 80),
    (6, 6, 96),
    (5, 1, 48),
    (8, 4, 256),
    (4, 2, 192),
    (10, 2, 112),
]  # 5 / 1: a tile has 25 queries
WIDE = torch.bfloat16


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (*MARKS, pytest.mark.skipif(not HERE, reason="it is for Hopper")):
        test = mark(test)
    return test


def others_are_nan(keys: torch.Tensor, values: torch.Tensor, at: Columns) -> None:
    """All that no request has computed yet, this step's own lines among it: those are read from the projection."""
    page, seen = keys.shape[1], torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
    for row, start in zip(at.rows.tolist(), at.starts.tolist(), strict=True):
        where = torch.arange(start, device=keys.device)
        seen[at.blocks[row, where // page].long(), where % page] = True
    keys[~seen] = values[~seen] = torch.nan


def check(shape: tuple[int, int, int], page: int, dtype: torch.dtype, extras: Extras = PLAIN) -> None:
    query, keys, values, at = make(REQUESTS, *shape, dtype, page)
    expected = attention(query, keys, values, at, 0.125, extras)
    qkv = step_of(keys, values, at, shape[0])
    others_are_nan(keys, values, at)
    if extras.window:
        give_away(keys, values, at, extras.window)
    out = torch.full_like(query, torch.nan)
    assert hopper.fits(query, keys)
    hopper.prefill(query, keys, values, at, 0.125, out, extras=extras, qkv=qkv)
    near(out, expected, dtype, 2)


@on_hopper
@pytest.mark.parametrize(("shape", "dtype"), list(product(SHAPES, (torch.float16, torch.bfloat16))))
def test_prefill(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(shape, 16, dtype)


@on_hopper
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_heads_of_any_size(shape: tuple[int, int, int]) -> None:
    check(shape, 16, WIDE)


@on_hopper
@pytest.mark.parametrize("page", [8, 32, 64, 128, 400, 528])
def test_pages_of_any_size(page: int) -> None:
    """Those that are no part of a tile come in parts."""
    check((8, 2, 128), page, WIDE)
    check((8, 2, 256), page, WIDE, Extras(window=200))


def test_what_a_bulk_copy_brings() -> None:
    assert [hopper.part_of_page(page, 128) for page in (8, 16, 128, 400, 528, 1056, 256)] == [
        8,
        16,
        128,
        16,
        16,
        32,
        128,
    ]
    assert hopper.part_of_page(256, 256) == 64
    assert hopper.part_of_page(20, 128) < hopper.LEAST_PAGE, "refused"


@on_hopper
@pytest.mark.parametrize("window", [5, 40, 200, 2000])
def test_windows(window: int) -> None:
    check((8, 2, 128), 16, WIDE, Extras(window=window))


@on_hopper
def test_soft_cap_and_sinks() -> None:
    check((8, 4, 128), 16, WIDE, Extras(cap=5.0, sinks=torch.randn(8, device="cuda")))
    check((8, 4, 64), 16, WIDE, Extras(cap=5.0, window=100))
    check((8, 4, 256), 32, WIDE, Extras(cap=5.0, window=100))


@on_hopper
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 128), (28, 4, 128), (8, 4, 256)])
def test_a_worker_finds_it_right(shape: tuple[int, int, int], windowed: bool) -> None:
    variant = Variant(*shape, 16, WIDE, windowed, capped=True)
    assert self_test_hopper(variant, torch.device("cuda"), 30.0) == ""


@on_hopper
def test_decodes_are_left_alone() -> None:
    query, keys, values, at = make([(9, 1), (37, 1), (30, 1), (0, 210), (8, 9)], 32, 8, 128, WIDE)
    expected = attention(query, keys, values, at, 0.125)
    qkv = step_of(keys, values, at, 32)
    for skip, fewest in ((3, 1), (0, 2)):
        out = torch.full_like(query, 7.0)
        hopper.prefill(query, keys, values, at, 0.125, out, skip, qkv=qkv, fewest=fewest)
        assert (out[:3] == 7.0).all()
        near(out[3:], expected[3:], WIDE, 2)


@on_hopper
def test_what_it_does_not_take() -> None:
    for dim in (32, 320, 100):
        query, keys, _, _ = make([(0, 5)], 4, 2, dim, WIDE)
        assert not hopper.fits(query, keys)
    query, keys, _, _ = make([(0, 5)], 4, 2, 64, WIDE)
    assert hopper.fits(query, keys)
    assert not hopper.fits(query, keys.to(torch.float8_e4m3fn))


def test_it_is_for_gpus() -> None:
    tensor = torch.zeros(5, 4, 64, dtype=torch.float16)
    assert not hopper.fits(tensor, torch.zeros(1, 16, 2, 64, dtype=torch.float16))
