"""Experts with MXFP4 weights beside what the GPU allows: the bytes of the experts that are touched, and a bfloat16 product.

    python -P -m meshlm.kernels.mxfp4_experts.bench [--experts 32] [--topk 4] [--hidden 2880] [--wide 2880] [--rows 1 8 64 1024]
        [--tile 16 64 4 4] [--json FILE]

The default sizes are gpt-oss-20b's. Gate and down are timed apart in CUDA graphs, with tokens that choose at random, each choice with
other experts, so that weights come from memory. --tile: block_m, block_n, warps and stages in the place of the plan's.
"""

import argparse

import torch

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.moe_align.kernel import align
from meshlm.kernels.mxfp4_experts import kernel
from meshlm.kernels.mxfp4_experts.layout import CHUNK, MXFP4Weight, chunks_of
from meshlm.kernels.mxfp4_experts.plan import plan_for

BYTES_AT_ONCE = 400 << 20  # of weights that a graph reads, at least


def some_weights(experts: int, outputs: int, inputs: int) -> MXFP4Weight:
    chunks = chunks_of(inputs)
    codes = torch.randint(-(1 << 15), 1 << 15, (experts, outputs, chunks * 32), dtype=torch.int16, device="cuda")
    scales = torch.randint(118, 124, (experts, outputs, chunks * 4), dtype=torch.uint8, device="cuda")
    return MXFP4Weight(codes, scales, inputs)


def measure(sizes: tuple[int, int, int, int], rows: int, tile: list[int] | None) -> dict[str, object]:
    """Microseconds, TB/s of the weights that are touched, TFLOP/s."""
    experts, topk, hidden, wide = sizes
    plan = plan_for(rows, topk, experts)
    gate_shape, down_shape = (kernel.Shape(*tile),) * 2 if tile else (plan.gate, plan.down)
    touched_most = min(experts, rows * topk)
    copies = max(1, min(16, BYTES_AT_ONCE // (touched_most * hidden * wide)))
    gate_up, down = some_weights(experts, 2 * wide, hidden), some_weights(experts, hidden, wide)
    choices = [torch.rand(rows, experts, device="cuda").topk(topk).indices.to(torch.int32) for _ in range(copies)]
    weights = torch.rand(rows, topk, device="cuda")
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    found: dict[str, object] = {"rows": rows, "kind": plan.kind}
    touched = sum(len(choice.unique()) for choice in choices) / copies
    lines = rows * topk if plan.kind == "few" else len(align(choices[0], experts, gate_shape.block_m).ids)
    inner = torch.randn(lines, wide, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(lines, hidden, device="cuda", dtype=torch.bfloat16)
    parts = torch.empty(topk, rows, hidden, device="cuda")

    def gate() -> None:
        for choice in choices:
            if plan.kind == "few":
                kernel.few(x, gate_up, choice, None, inner, gate_shape)
            else:
                ids, _, ends, owners = align(choice, experts, gate_shape.block_m)
                order = kernel.Rows(ids, ends, owners, topk, rows * topk)
                kernel.sorted_rows(x, gate_up, inner, gate_shape, order, gate=True)

    def below() -> None:
        for choice in choices:
            if plan.kind == "few":
                kernel.few(inner, down, choice, weights, parts, down_shape)
            else:
                ids, _, ends, owners = align(choice, experts, down_shape.block_m)
                kernel.sorted_rows(inner, down, out, down_shape, kernel.Rows(ids, ends, owners, topk, rows * topk))

    for name, run, outputs, inputs in (("gate", gate, 2 * wide, hidden), ("down", below, hidden, wide)):
        us = microseconds(run, repeats=9) / copies
        read = touched * outputs * chunks_of(inputs) * (CHUNK // 2 + 4)
        found |= {
            f"{name}_us": round(us, 1),
            f"{name}_tb_s": round(read / us / 1e6, 2),
            f"{name}_tflop_s": round(2 * rows * topk * outputs * inputs / us / 1e6, 1),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("experts", 32), ("topk", 4), ("hidden", 2880), ("wide", 2880)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--tile", type=int, nargs=4)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    sizes = (arguments.experts, arguments.topk, arguments.hidden, arguments.wide)
    report((measure(sizes, rows, arguments.tile) for rows in arguments.rows), arguments.json, sizes=sizes)


if __name__ == "__main__":
    main()
