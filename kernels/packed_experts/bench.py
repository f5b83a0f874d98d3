"""Experts with packed weights beside what the GPU allows: the bytes of the experts that are touched, and a bfloat16 product.

    python -P -m meshlm.kernels.packed_experts.bench [--experts 32] [--topk 4] [--hidden 2880] [--wide 2880] [--rows 1 8 64 1024]
        [--kind "4 bits, groups of 128"] [--tile 16 64 4 4 | --direct 0 1 4 3 2 4 1] [--json FILE]

The default sizes are gpt-oss-20b's. Gate and down are timed apart in CUDA graphs, with tokens that choose at random, each choice with
other experts, so that weights come from memory. --tile: block_m, block_n, warps and stages in the place of the plan's. --direct: by
direct.py, with rows of a tile (0: they are not sorted), tiles, warps and depth of gate and of down (0 0 0:
not by it); without numbers the fastest of all that the tuner tries.
"""

import argparse
from functools import partial

from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.packed_experts import kernel
from meshlm.kernels.packed_experts import plan as plans
from meshlm.kernels.packed_experts.layout import MXFP4
from meshlm.kernels.packed_experts.runs import Runs


def measure(sizes: Layer, kind: str, rows: int, tile: list[int] | None, direct: list[int] | None) -> dict[str, object]:
    """Microseconds, TB/s of the weights that are touched, TFLOP/s."""
    if direct == []:
        every = [measure(sizes, kind, rows, None, list(one)) for one in plans.candidates(rows, sizes)]
        return min(every, key=lambda one: float(str(one["gate_us"])) + float(str(one["down_us"])))
    plan = plans.decoded(direct, kind) if direct else plans.usual_plan(rows, sizes, kind)
    if tile:
        plan = plan._replace(gate=kernel.Shape(*tile), down=kernel.Shape(*tile))
    runs = Runs(sizes, rows, kind=kind)
    found: dict[str, object] = {"rows": rows, "kind": plan.kind, "direct": direct}
    for name, run, weight in (("gate", runs.gate, runs.gate_up), ("down", runs.down, runs.down_weight)):
        us = microseconds(partial(run, plan), repeats=9) / len(runs.choices)
        read = runs.touched() / sizes.experts * sum(tensor.nbytes for tensor in weight.tensors().values())
        found |= {
            f"{name}_us": round(us, 1),
            f"{name}_tb_s": round(read / us / 1e6, 2),
            f"{name}_tflop_s": round(2 * rows * sizes.topk * weight.outputs * weight.inputs / us / 1e6, 1),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("experts", 32), ("topk", 4), ("hidden", 2880), ("wide", 2880)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--kind", default=MXFP4.name, help="names of the formats of gate and up, and of down where it is another"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--tile", type=int, nargs=4)
    parser.add_argument("--direct", type=int, nargs="*")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    sizes = Layer(arguments.experts, arguments.topk, arguments.hidden, arguments.wide)
    found = (measure(sizes, arguments.kind, rows, arguments.tile, arguments.direct) for rows in arguments.rows)
    report(found, arguments.json, sizes=sizes, kind=arguments.kind)


if __name__ == "__main__":
    main()
