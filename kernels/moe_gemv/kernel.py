"""Products of one row with the weights of its experts, bound by reading each of those once.

    gate   out[j] = silu(x W_gate[e_j]^T) * (x W_up[e_j]^T)
    down   out = sum over j of weight_j (x[j] W[e_j]^T)            a program has all experts of its columns: nothing is left to add up

As in kernels/gemv the row stays in registers. A gate's tiles of the weight are a stream of asynchronous copies. `down` comes behind
`gate` (PDL counts on it): the choice of experts is known before `gate` begins.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl


@triton.jit
def _gate(
    x, w, experts, out, blocks,
    TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of BLOCK_N columns of all experts, in turns."""
    nth, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = k < INPUTS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: `_down` reads the choice of experts as soon as it begins
    y = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    each: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        j = block // each
        n = block % each * BLOCK_N + nth
        expert = tl.load(experts + j)
        real = (n < OUTPUTS) & (nth * 0 + expert >= 0)
        line = (
            w
            + tl.maximum(expert, 0).to(tl.int64) * (2 * OUTPUTS * INPUTS)
            + n[:, None].to(tl.int64) * INPUTS
            + k[None, :]
        )
        mask = real[:, None] & inside[None, :]
        gate = tl.sum(tl.load(line, mask=mask, other=0.0).to(tl.float32) * y[None, :], axis=1)
        up = tl.sum(tl.load(line + OUTPUTS * INPUTS, mask=mask, other=0.0).to(tl.float32) * y[None, :], axis=1)
        tl.store(out + j * OUTPUTS + n, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=n < OUTPUTS)


@triton.jit
def _down(
    x, w, experts, weights, out,
    TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All that a program reads of the weights is asked for at once, while `_gate` still runs."""
    j, k = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (j < TOPK)[:, None] & (k < INPUTS)[None, :]
    expert = tl.load(experts + j, mask=j < TOPK, other=-1, cache_modifier=".cg")
    line = tl.maximum(expert, 0).to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    real = (expert >= 0)[:, None] & (n < OUTPUTS)[None, :]
    tile = tl.load(
        w + line[:, :, None] * INPUTS + k[None, None, :], mask=real[:, :, None] & (k < INPUTS)[None, None, :], other=0.0
    )  # fmt: skip
    pdl.follow(PDL)
    scale = tl.load(weights + j, mask=j < TOPK, other=0.0)
    y = tl.load(x + j[:, None] * INPUTS + k[None, :], mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    total = tl.sum(tile.to(tl.float32) * y[:, None, :], axis=0)
    tl.store(out + n, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=n < OUTPUTS)


class Shape(NamedTuple):
    """Outputs of a program's block, warps; of a gate: stages, and programs on each multiprocessor."""

    block_n: int
    warps: int
    stages: int = 3
    programs: int = 4


def gate_gemv(x: Tensor, w: Tensor, experts: Tensor, out: Tensor, shape: Shape) -> Tensor:
    """x [1, k], w [experts, 2 n, k], experts int32 [1, topk] -> out [topk, n]; of -1 zeros."""
    outputs, inputs = w.shape[1] // 2, w.shape[2]
    blocks = experts.numel() * triton.cdiv(outputs, shape.block_n)
    _gate[(min(blocks, shape.programs * pdl.multiprocessors(x.device)),)](
        x, w, experts, out, blocks, TOPK=experts.numel(), INPUTS=inputs, OUTPUTS=outputs, BLOCK_N=shape.block_n,
        BLOCK_K=triton.next_power_of_2(inputs), STAGES=shape.stages, num_warps=shape.warps,
        num_stages=shape.stages, **pdl.options(x),
    )  # fmt: skip
    return out


def down_gemv(x: Tensor, w: Tensor, experts: Tensor, weights: Tensor, out: Tensor, shape: Shape) -> Tensor:
    """x [topk, k], w [experts, n, k], experts int32 [1, topk], weights float32 [1, topk] -> out [1, n]."""
    outputs, inputs = w.shape[1], w.shape[2]
    _down[(triton.cdiv(outputs, shape.block_n),)](
        x, w, experts, weights, out, TOPK=experts.numel(), INPUTS=inputs, OUTPUTS=outputs,
        BLOCK_J=triton.next_power_of_2(experts.numel()), BLOCK_N=shape.block_n, BLOCK_K=triton.next_power_of_2(inputs),
        num_warps=shape.warps, **pdl.options(x),
    )  # fmt: skip
    return out
