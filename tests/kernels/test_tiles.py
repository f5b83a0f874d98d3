"""Which tiles a decode may have: pure, no GPU."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshlm.kernels.attention.tiles import (
    hopper_wave,
    most_parts_of,
    one_of_each,
    splits_of,
    tile_of_head,
    verify_lines,
    verify_tile,
    warm_verified,
)

GPUS = st.tuples(st.floats(0.5, 16), st.integers(1, 400))


@given(st.integers(1, 10**5), GPUS)
def test_parts_are_bounded_by_the_gpu_alone(programs: int, gpu: tuple[float, int]) -> None:
    splits = splits_of(programs, *gpu)
    assert splits == 1 or programs * splits <= most_parts_of(*gpu)


@given(st.integers(1, 40), st.integers(1, 1100), GPUS)
def test_what_is_warmed_up_has_all_numbers_of_splits(kv_heads: int, most: int, gpu: tuple[float, int]) -> None:
    sizes = one_of_each(lambda requests: splits_of(requests * kv_heads, *gpu), most)
    assert {splits_of(size * kv_heads, *gpu) for size in sizes} == {
        splits_of(requests * kv_heads, *gpu) for requests in range(1, most + 1)
    }
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert len(set(sizes)) == len(sizes)


def test_powers_of_two_and_what_they_skip() -> None:
    """A B200 has 148 multiprocessors; with 8 kv heads, 8 parts are for 9 to 14 requests only."""
    assert one_of_each(lambda requests: splits_of(8 * requests, 4.0, 148), 64) == [1, 2, 4, 8, 9, 16, 32, 64]
    assert one_of_each(lambda requests: splits_of(8 * requests, 4.0, 132), 48) == [1, 2, 4, 8, 16, 32, 48]


def test_large_heads_have_tiles_that_fit_the_shared_memory() -> None:
    """Of an H100: 227 KiB for a tile of queries, and keys and values of each stage."""
    tile = (64, 64, 4, 3)
    assert tile_of_head(tile, 128) == tile
    rows, block_n, _, stages = tile_of_head(tile, 256)
    assert (rows + 2 * stages * block_n) * 256 * 2 <= 100 << 10
    rows, block_n, warps, stages = tile_of_head(tile, 512)
    assert (rows + 2 * stages * block_n) * 512 * 2 <= 100 << 10
    assert rows * 512 <= 64 * 32 * warps, "numbers of the sum that a thread keeps in registers"
    assert tile_of_head((16, 64, 1, 2), 512)[0] == 16, "parts of a context are as many as before"


def test_a_wave_of_attention_is_a_tile_for_each_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 has 132: of 32 query heads over 8 of keys 32 tokens are a tile, of 28 over 4 it is 18."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    device = torch.device("cuda")
    assert [hopper_wave(*heads, device) for heads in ((32, 8), (28, 4), (16, 8), (32, 32))] == [528, 594, 1056, 528]


@given(st.integers(1, 128), st.integers(1, 16), st.sampled_from([32, 64, 80, 96, 128, 192, 256, 320, 512]))
def test_the_lines_of_drafts_fit_the_registers(group: int, queries: int, dim: int) -> None:
    lines = verify_lines(group * queries, dim)
    assert lines in {16, 32, 64, 128}
    assert lines * dim <= 64 * 32 * 8, "numbers of the sums that a thread of eight warps keeps"
    assert lines >= min(group * queries, 32), "or keys are read more often than they must be"


H200 = SimpleNamespace(multi_processor_count=132)


@pytest.mark.parametrize(
    ("tokens", "queries", "expected"), [(5, 5, (32, 32, 4)), (80, 5, (32, 4, 4)), (320, 5, (32, 1, 4))]
)
def test_drafts_of_a_model_of_8_billions(
    tokens: int, queries: int, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 16 and 64 requests with five tokens: lines, splits as the same requests' decodes have them, and warps for the lines."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    tile = verify_tile(tokens, queries, 8, 4096, torch.device("cuda"), 4)
    assert (tile.lines, tile.splits, tile.warps) == expected
    assert tile.of(queries, 4) == 1
    assert tile.of(16, 16) == 8


def test_what_is_warmed_up_has_all_tiles_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    device, kinds, most = torch.device("cuda"), [(32, 8, 128), (32, 4, 64)], 300

    def tiles(tokens: int) -> list[tuple[int, ...]]:
        return [verify_tile(tokens, 5, kv, 1 << 15, device, heads // kv, dim) for heads, kv, dim in kinds]

    warm = warm_verified(5, kinds, most, device=device, longest=1 << 15)
    assert warm[0] == 1
    assert warm[-1] == most
    for nth in range(len(kinds)):
        assert {tiles(tokens)[nth] for tokens in warm} == {tiles(tokens)[nth] for tokens in range(1, most + 1)}
