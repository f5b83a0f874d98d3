"""The tensors of a step, made on the device from its persistent rows.

A batch is three columns: `rows` int32 [n], `starts` int32 [n], `ends` int32 [n] (prefix sums of the token counts). Token t belongs to
the first request i with t < ends[i]; its position is starts[i] + t - (ends[i - 1] or 0), its id tokens[rows[i], position], its slot
in group g blocks[g, rows[i], position / size] * size + position % size. Tokens past the last request are padding: id 0, position 0,
slot -1.

`scatter` applies what changed: segments of an int32 buffer are copied to places of the state tensor, where all rows live.
"""

import triton
import triton.language as tl
from torch import Tensor

STEPS, FEW = 11, 2047  # of the bisection: enough for so many requests; more of them are another variant
MORE_STEPS, MOST = 14, 16383


@triton.jit(do_not_specialize=["n", "total"])
def _prepare_inputs(
    rows, starts, ends, tokens, tokens_stride, blocks, group_stride, blocks_stride, n, total,
    input_ids, positions, slots, slots_stride, GROUPS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)  # first request with t < ends[i], by bisection
    high = tl.zeros((BLOCK,), tl.int32) + n
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        past = (low < high) & (tl.load(ends + middle, mask=middle < n, other=0) <= t)
        high = tl.where((low < high) & ~past, middle, high)
        low = tl.where(past, middle + 1, low)
    real = low < n
    row = tl.load(rows + low, mask=real, other=0).to(tl.int64)
    begin = tl.load(ends + low - 1, mask=real & (low > 0), other=0)
    position = tl.load(starts + low, mask=real, other=0) + t - begin
    position = tl.where(real, position, 0)
    token = tl.load(tokens + row * tokens_stride + position, mask=real, other=0)
    inside = t < total
    tl.store(input_ids + t, token.to(tl.int64), mask=inside)
    tl.store(positions + t, position.to(tl.int64), mask=inside)
    place = blocks + row * blocks_stride + position // SIZE
    for group in tl.static_range(GROUPS):
        block = tl.load(place + group * group_stride, mask=real, other=0).to(tl.int64)
        slot = tl.where(real, block * SIZE + position % SIZE, -1)
        tl.store(slots + group * slots_stride + t, slot, mask=inside)


def prepare_inputs(
    rows: Tensor, starts: Tensor, ends: Tensor, n: int, tokens: Tensor, blocks: Tensor, block_size: int,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill input_ids, positions [t] and slots [groups, t] (int64) for the first n requests of the columns.

    blocks int32 [groups, rows, any].

    Padding requests of a graph have the row of a dummy and no tokens (their `ends` repeat)."""
    assert n <= MOST
    total = out[0].shape[0]
    _prepare_inputs[(triton.cdiv(total, 128),)](
        rows, starts, ends, tokens, tokens.stride(0), blocks, blocks.stride(0), blocks.stride(1), n, total, *out,
        out[2].stride(0), GROUPS=blocks.shape[0], SIZE=block_size, STEPS=STEPS if n <= FEW else MORE_STEPS, BLOCK=128, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["base"])
def _scatter(updates, state, base, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    to = tl.load(updates + segment * 3).to(tl.int64)
    begin = tl.load(updates + segment * 3 + 1)
    length = tl.load(updates + segment * 3 + 2)
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(updates + base + begin + at, mask=at < length)
        tl.store(state + to + at, value, mask=at < length)


def scatter(updates: Tensor, num_segments: int, state: Tensor) -> None:
    """updates int32: num_segments triples (place in `state`, place in the data, length), then the data. state int32, flat."""
    _scatter[(num_segments, 4)](updates, state, 3 * num_segments, BLOCK=1024, num_warps=4)
