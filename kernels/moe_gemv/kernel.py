"""Products of one row with the weights of its experts, bound by reading each of those once.

    gate   out[j] = silu(x W_gate[e_j]^T) * (x W_up[e_j]^T)
    down   out = sum over j of weight_j (x[j] W[e_j]^T)            a program has all experts of its columns: nothing is left to add up

As in kernels/gemv the row stays in registers, and tiles of the weight are a stream of asynchronous copies.
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
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
    TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    real, inside = n < OUTPUTS, k < INPUTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for j in tl.range(0, TOPK, num_stages=STAGES):
        expert = tl.load(experts + j)
        scale = tl.where(expert >= 0, tl.load(weights + j), 0.0)
        line = (
            w + tl.maximum(expert, 0).to(tl.int64) * (OUTPUTS * INPUTS) + n[:, None].to(tl.int64) * INPUTS + k[None, :]
        )
        y = tl.load(x + j * INPUTS + k, mask=inside, other=0.0).to(tl.float32) * scale
        total += tl.load(line, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32) * y[None, :]
    tl.store(out + n, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=real)


class Shape(NamedTuple):
    """Outputs of a program's block, warps, stages; programs on each multiprocessor (of a gate)."""

    block_n: int
    warps: int
    stages: int
    programs: int = 4


def gate_gemv(x: Tensor, w: Tensor, experts: Tensor, out: Tensor, shape: Shape) -> Tensor:
    """x [1, k], w [experts, 2 n, k], experts int32 [1, topk] -> out [topk, n]; of -1 zeros."""
    outputs, inputs = w.shape[1] // 2, w.shape[2]
    blocks = experts.numel() * triton.cdiv(outputs, shape.block_n)
    use_pdl = x.is_cuda and pdl.supported()
    _gate[(min(blocks, shape.programs * pdl.multiprocessors(x.device)),)](
        x, w, experts, out, blocks, TOPK=experts.numel(), INPUTS=inputs, OUTPUTS=outputs, BLOCK_N=shape.block_n,
        BLOCK_K=triton.next_power_of_2(inputs), STAGES=shape.stages, PDL=use_pdl, num_warps=shape.warps,
        num_stages=shape.stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out


def down_gemv(x: Tensor, w: Tensor, experts: Tensor, weights: Tensor, out: Tensor, shape: Shape) -> Tensor:
    """x [topk, k], w [experts, n, k], experts int32 [1, topk], weights float32 [1, topk] -> out [1, n]."""
    outputs, inputs = w.shape[1], w.shape[2]
    use_pdl = x.is_cuda and pdl.supported()
    _down[(triton.cdiv(outputs, shape.block_n),)](
        x, w, experts, weights, out, TOPK=experts.numel(), INPUTS=inputs, OUTPUTS=outputs, BLOCK_N=shape.block_n,
        BLOCK_K=triton.next_power_of_2(inputs), STAGES=shape.stages, PDL=use_pdl, num_warps=shape.warps,
        num_stages=shape.stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
