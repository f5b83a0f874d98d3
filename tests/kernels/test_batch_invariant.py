"""Batch-invariant products and attention: a row's bits, and a query's, depend on nothing that is computed beside it.

On a GPU to the last bit; Triton's interpreter multiplies by a library whose last bit depends on the place of a row.
"""

import pytest
import torch
from device import DEVICE, MARKS, ON_GPU, near

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.attention.requests import PagedStep, some_columns
from meshlm.kernels.batch_invariant import attention as invariant
from meshlm.kernels.batch_invariant import gemm
from meshlm.kernels.batch_invariant.gemm import FEW_ROWS, Tile, splits_of
from meshlm.kernels.silu_mul.reference import silu_mul

pytestmark = MARKS
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# Sizes whose sums are one share, two and four, with a short last share, and with inputs that no tile divides.
SHAPES = [(72, 520), (136, 1024), (200, 2048), (128, 2056)]
PAGE = 16


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected) if ON_GPU else torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_is_the_same_alone_and_beside_others(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, inputs, device=DEVICE, dtype=DTYPE)
    w = torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE) / inputs**0.5
    bias = torch.randn(outputs, device=DEVICE, dtype=DTYPE)
    alone = gemm.gemm(x[:1], w, bias)
    torch.testing.assert_close(alone.float(), (x[:1].float() @ w.float().t() + bias.float()), atol=3e-2, rtol=3e-2)
    for rows in (2, 64, 65, FEW_ROWS, FEW_ROWS + 1, 300):
        beside = x[:rows].roll(rows - 1, 0)
        assert same(gemm.gemm(beside, w, bias)[-1:], alone), rows
        into = torch.empty(rows, outputs, device=DEVICE, dtype=DTYPE)
        assert gemm.gemm(beside, w, out=into) is into
        assert same(into[-1:], gemm.gemm(x[:1], w)), rows


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_gated(outputs: int, inputs: int) -> None:
    """Gate and up projection with the gate, as the unfused operations round."""
    torch.manual_seed(0)
    x = torch.randn(300, inputs, device=DEVICE, dtype=DTYPE)
    w = torch.randn(2 * outputs, inputs, device=DEVICE, dtype=DTYPE) / inputs**0.5
    alone = gemm.gemm(x[:1], w, gate=True)
    near(alone, silu_mul((x[:1].float() @ w.float().t()).to(DTYPE)), DTYPE, 2.0)
    for rows in (2, 64, FEW_ROWS, FEW_ROWS + 1, 300):
        assert same(gemm.gemm(x[:rows].roll(rows - 1, 0), w, gate=True)[-1:], alone), rows


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_no_tile_changes_a_bit(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, inputs, device=DEVICE, dtype=DTYPE)
    w = torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE) / inputs**0.5
    expected = gemm.gemm(x, w)
    for tile in (Tile(64, 64, 64, 4, 3), Tile(128, 128, 64, 8, 2)):
        for apart in (True, False):
            assert same(gemm.gemm(x, w, tile=tile, apart=apart), expected), (tile, apart)


def test_shares_follow_from_the_weight() -> None:
    """Of Llama-3.1-8B and Qwen3-1.7B; small ones have enough inputs to be worth a program."""
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    assert [splits_of(*shape) for shape in shapes] == [4, 4, 1, 4, 1]
    assert [splits_of(*shape) for shape in ((4096, 2048), (12288, 2048), (2048, 6144), (64, 64))] == [4, 2, 4, 1]


def test_no_rows() -> None:
    assert gemm.gemm(torch.empty(0, 64, device=DEVICE), torch.empty(32, 64, device=DEVICE)).shape == (0, 32)


CONTEXTS = [1, 63, 64, 65, 512, 513, 1100] if ON_GPU else [1, 65, 530]
LONGEST = 2048
HEADS = 6, 2, 128 if ON_GPU else 16  # groups of three: lines of a tile that are no query's


def attend(
    step: PagedStep, at: Columns, query: torch.Tensor, programs: int | None, *, decodes: bool, window: int,
    tile: tuple[int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.full_like(query, torch.nan)
    workspace = invariant.Workspace(torch.device(DEVICE))
    invariant.attention(
        query, step.keys, step.values, at, 0.2, out, workspace, longest=LONGEST, decodes=decodes, window=window,
        programs=programs, tile=tile,
    )  # fmt: skip
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize("window", [0, 100])
def test_a_query_is_the_same_in_a_decode_a_prompt_and_any_chunk(window: int) -> None:
    """The last token of each of some contexts; chunks begin anywhere, and others stand before and behind."""
    torch.manual_seed(0)
    step = PagedStep.random([(0, context) for context in CONTEXTS], HEADS, PAGE, DTYPE, DEVICE)
    at, last = step.at, step.at.ends.long() - 1
    whole = attend(step, at, step.query, None, decodes=False, window=window)
    assert whole.isfinite().all()
    expected = whole[last]
    ones = torch.arange(1, at.n + 1, device=DEVICE, dtype=torch.int32)
    lengths = torch.tensor(CONTEXTS, device=DEVICE, dtype=torch.int32)
    alone = Columns(at.rows, lengths - 1, ones, at.n, at.blocks)
    for programs in (None, 1, 2, 3):
        assert same(attend(step, alone, step.query[last], programs, decodes=True, window=window), expected)
        assert same(attend(step, alone, step.query[last], programs, decodes=False, window=window), expected)
    for tile in ((64, 8, 3), (64, 4, 3), (32, 4, 5)):
        assert same(attend(step, at, step.query, None, decodes=False, window=window, tile=tile)[last], expected), tile
        assert same(attend(step, alone, step.query[last], 2, decodes=True, window=window, tile=tile), expected), tile
    for most in (5, 200):
        counts = torch.minimum(lengths, torch.full_like(lengths, most))
        query = torch.cat([step.query[end - count + 1 : end + 1] for end, count in zip(last, counts, strict=True)])
        chunk = Columns(at.rows, lengths - counts, counts.cumsum(0).int(), at.n, at.blocks)
        for programs in (None, 2):
            found = attend(step, chunk, query, programs, decodes=False, window=window)
            assert same(found[counts.cumsum(0) - 1], expected), (most, programs)


def test_padding_is_left_alone() -> None:
    """Requests without tokens behind the others, as a CUDA graph has them, and keys of nobody, which may be no numbers."""
    torch.manual_seed(0)
    step = PagedStep.random([(40, 1), (600, 1)], HEADS, PAGE, DTYPE, DEVICE)
    found = attend(step, step.at, step.query, None, decodes=True, window=0)
    rows, starts, ends = (
        torch.cat((part, part[-1:], part[-1:])) for part in (step.at.rows, step.at.starts, step.at.ends)
    )
    step.spoil_others(lambda start: 0, own=True)
    query = torch.cat((step.query, torch.full_like(step.query, torch.nan)))
    for decodes in (True, False):
        padded = attend(step, Columns(rows, starts, ends, 4, step.at.blocks), query, None, decodes=decodes, window=0)
        assert same(padded[:2], found)
        assert padded[2:].isnan().all()


def test_pages_before_a_window_are_not_read() -> None:
    torch.manual_seed(0)
    step = PagedStep.random([(900, 20)], HEADS, PAGE, DTYPE, DEVICE)
    found = attend(step, step.at, step.query, None, decodes=False, window=100)
    step.spoil_others(lambda start: start - 99, own=True)
    for programs in (1, 2):
        assert same(attend(step, step.at, step.query, programs, decodes=False, window=100), found)


def test_programs_fill_the_gpu() -> None:
    """As many as it runs at once, no more than there are splits; one where the workspace is too small."""
    of = invariant.programs_of
    multiprocessors = 8 if not ON_GPU else torch.cuda.get_device_properties(0).multi_processor_count
    device = torch.device(DEVICE)
    assert of(1, 2, 64, 1000, device) == min(64, invariant.PROGRAMS * multiprocessors // 2)
    assert of(1, 2, 3, 1000, device) == 3
    assert of(1, 2, 64, 1 << 25, device) == 1
    assert of(10_000, 8, 64, 1000, device) == 1


def test_columns_of_any_width() -> None:
    """More requests than one turn of the search for a tile's request takes."""
    torch.manual_seed(0)
    at, pages = some_columns([(7, 1)] * 259 + [(3, 4)], PAGE, torch.device(DEVICE))
    keys, values = torch.randn(2, pages, PAGE, 1, 16, device=DEVICE).to(DTYPE)
    step = PagedStep(torch.randn(263, 1, 16, device=DEVICE).to(DTYPE), keys, values, at, [])
    found = attend(step, at, step.query, None, decodes=False, window=0)
    assert found.isfinite().all()
    first = Columns(at.rows[258:259], at.starts[258:259], torch.ones_like(at.ends[:1]), 1, at.blocks)
    assert same(attend(step, first, step.query[258:259], None, decodes=True, window=0)[0], found[258])
