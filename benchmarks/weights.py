"""How fast a linear layer is in each format of weights: the shapes of Llama-3.1-8B at several numbers of rows.

    python -P benchmarks/weights.py [--rows 1 8 64 2048] [--sweep | --few] [--json FILE]

Each figure is the time of one product, from a CUDA graph over as many copies of the weight as do not fit into the L2 cache, beside the
time that its bytes take at 4.3 TB/s and that of cuBLAS in bfloat16. --sweep times shapes of the packed kernel and prints the best,
--few those of kernels/packed_few (up to 16 rows times 4 bits).
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.fp8_gemm import kernel as fp8_kernel
from meshlm.kernels.measure import keep, replay_us
from meshlm.kernels.moe_sum.kernel import sum_parts
from meshlm.kernels.packed_few import kernel as packed_few
from meshlm.kernels.packed_few import plan
from meshlm.kernels.packed_gemm import kernel, reference
from meshlm.kernels.packed_gemm.kernel import Shape
from meshlm.kernels.packed_gemm.reference import CHUNK, PackedWeight
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.quantise_fp8.kernel import quantise

SIZES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TB_S = 4.3e12  # what memory gives
COLD_BYTES = 160 << 20
FORMATS = {
    "int4, groups of 128, zeros (GPTQ, AWQ)": (4, 128, "zeros"),
    "int4, groups of 128 (W4A16)": (4, 128, "symmetric"),
    "int4, groups of 32 (Q4_0)": (4, 32, "symmetric"),
    "int8, a group (W8A16)": (8, 1 << 20, "symmetric"),
    "Q4_K, Q4_1": (4, 32, "minima"),
    "Q5_K": (5, 32, "minima"),
    "Q6_K": (6, 16, "symmetric"),
    "Q8_0": (8, 32, "symmetric"),
    "NF4": (4, 64, "table"),
}


def packed(outputs: int, inputs: int, bits: int, group: int, kind: str) -> PackedWeight:
    """Random codes."""
    chunks = -(-inputs // 256)
    group = min(group, chunks * 256)
    groups = -(-inputs // group)
    low = torch.randint(-(2**31), 2**31 - 1, (outputs, chunks * 32), device="cuda", dtype=torch.int32)
    high = None
    if bits > 4:
        words = {5: torch.uint8, 6: torch.int16, 8: torch.int32}[bits]
        high = low.to(words)
    scales = torch.rand(groups, outputs, device="cuda").half() / 100
    return PackedWeight(
        low, high, scales,
        zeros=torch.randint(0, 15, (groups, outputs), device="cuda", dtype=torch.uint8) if kind == "zeros" else None,
        minima=-scales if kind == "minima" else None,
        table=torch.linspace(-1, 1, 16, device="cuda") if kind == "table" else None,
        one_row=kind != "table" and group >= 32, some_rows=kind != "table", bits=bits, group=group,
        zero=1 << bits - 1 if kind == "symmetric" else 0, inputs=inputs,
    )  # fmt: skip


def size_of(weight: PackedWeight) -> int:
    tensors = (weight.low, weight.high, weight.scales, weight.zeros, weight.minima)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def timed(runs: list[Callable[[], Any]]) -> float:
    """Microseconds of one of these, which lie one behind the other in a graph."""
    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    replay_us(graph)
    return sorted(replay_us(graph) for _ in range(7))[3] / len(runs)


def copies_of(weight: PackedWeight) -> list[PackedWeight]:
    count = max(2, min(40, COLD_BYTES // size_of(weight)))
    return [
        weight._replace(
            low=weight.low.clone(),
            high=None if weight.high is None else weight.high.clone(),
            scales=weight.scales.clone(),
        )
        for _ in range(count)
    ]


def shapes_to_try(rows: int, outputs: int, inputs: int) -> list[Shape]:
    chunks = inputs // 256
    block_ms = (16,) if rows <= 16 else (32,) if rows <= 32 else (64,) if rows <= 64 else (64, 128)
    found = []
    for block_m, block_n, warps, stages, swap, asm in itertools.product(
        block_ms, (32, 64, 128), (4, 8), (2, 4), (False, True), (False, True)
    ):
        if (swap and block_n < 64) or (warps == 8 and block_n < 128) or (asm and block_m > 32):
            continue
        tiles = outputs // block_n * -(-rows // block_m)
        for splits in (1, 2, 4, 8):
            if (
                (splits == 1 or tiles * splits <= 700)
                and chunks // splits >= 4
                and (tiles * splits >= 120 or splits == 8)
            ):
                found.append(Shape(block_m, block_n, splits, warps, stages, swap, asm))
                if splits > 1:
                    break
    return found


def product(x: Tensor, weight: PackedWeight, shape: Shape) -> Tensor:
    found = kernel.parts(x, weight, shape)
    if shape.splits == 1:
        return found
    return sum_parts(found, torch.empty(x.shape[0], weight.outputs, dtype=x.dtype, device=x.device))


class Fp8:
    """Copies of a weight of 8-bit floats, and rows that are rounded to them. group: inputs that share a scale; 0: a row's."""

    def __init__(self, name: str, rows: int, group: int) -> None:
        self.group, (self.outputs, self.inputs) = group, SIZES[name]
        count = max(2, COLD_BYTES // (self.outputs * self.inputs))
        make: dict[str, Any] = {"device": "cuda"}
        self.weights = [torch.randn(self.outputs, self.inputs, **make).to(torch.float8_e4m3fn) for _ in range(count)]
        self.scales = torch.rand(self.outputs, self.inputs // group if group else 1, **make) / 100
        self.x = torch.randn(rows, self.inputs, dtype=torch.bfloat16, **make)
        self.codes, self.x_scales = quantise(self.x, group)

    def run(self, weight: Tensor, shape: fp8_kernel.Shape | None) -> Tensor:
        """None: as it is chosen."""
        if shape is None:
            return fp8_kernel.fp8_gemm(self.codes, self.x_scales, weight, self.scales, None, torch.bfloat16, self.group)
        found = fp8_kernel.parts(self.codes, self.x_scales, weight, self.scales, shape, torch.bfloat16)
        return found if shape.splits == 1 else summed(found)

    def shapes(self) -> list[fp8_kernel.Shape]:
        rows = max(16, len(self.x))
        every = itertools.product((64, 128), (128,) if self.group else (128, 256), (1, 2, 4), (4, 8), (3, 5))
        return [
            fp8_kernel.Shape(rows, block_n, block_k, splits, warps, stages, swap=True)
            for block_n, block_k, splits, warps, stages in every
            if 100 <= self.outputs // block_n * splits <= 900
            and (block_n + rows) * block_k * stages < 200 << 10
            and (warps == 4 or block_n == 128)
        ]


def summed(parts: Tensor) -> Tensor:
    return sum_parts(parts, torch.empty(parts.shape[1:], dtype=torch.bfloat16, device="cuda"))


def fp8(names: list[str], rows: list[int], *, every: bool) -> list[dict[str, Any]]:
    """A scale for each row, and for blocks of 128. every: all shapes of the kernel, not the chosen ones alone."""
    report = []
    for name, m, group in itertools.product(names, rows, (0, 128)):
        one = Fp8(name, m, group)
        tries: list[fp8_kernel.Shape | None] = [None, *(one.shapes() if every and m <= 128 else [])]
        found = timed_all([(shape, [partial(one.run, w, shape) for w in one.weights]) for shape in tries])
        facts = {
            "format": f"FP8, {'blocks of 128' if group else 'rows'}", "product": name, "rows": m,
            "bytes_us": one.outputs * one.inputs / TB_S * 1e6, "rounding_us": timed([partial(quantise, one.x, group)] * 20),
        }  # fmt: skip
        best = "; ".join(f"{us:.1f} {tuple(shape) if shape else 'chosen'}" for us, shape in found[:5])
        chosen = next((us for us, shape in found if shape is None), 0.0)
        print(
            {key: round(v, 1) if isinstance(v, float) else v for key, v in facts.items()},
            f"{best}; chosen {chosen:.1f}",
            flush=True,
        )
        report += [{**facts, "us": us, "shape": shape} for us, shape in found]
    return report


def few_rows(names: list[str], rows: list[int], kinds: list[str]) -> list[dict[str, Any]]:
    """Shapes of kernels/packed_few, and in their midst what kernels/packed_gemm takes (shape None)."""
    report = []
    for kind, name, m in itertools.product(kinds, names, [m for m in rows if m <= plan.MOST_ROWS]):
        outputs, inputs = SIZES[name]
        weights = copies_of(packed(outputs, inputs, *FORMATS[kind]))
        if not plan.takes(weights[0]):
            continue
        x = torch.randn(m, inputs, device="cuda", dtype=torch.bfloat16)
        expected = reference.packed_linear(x, weights[0]).float()

        def run(w: PackedWeight, shape: plan.Shape | None, x: Tensor = x) -> Tensor:
            return kernel.usual_product(x, w) if shape is None else packed_few.packed_few(x, w, shape)

        tries: list[plan.Shape | None] = [None, *plan.shapes_of(-(-inputs // CHUNK))]
        for shape in tries:
            error = float((run(weights[0], shape).float() - expected).abs().max() / expected.std())
            if not error < 0.05:
                print("WRONG", kind, name, m, shape, error)
        found = timed_all([(shape, [partial(run, w, shape) for w in weights]) for shape in tries])
        floor = size_of(weights[0]) / TB_S * 1e6
        best = "; ".join(f"{us:.1f} {tuple(shape) if shape else 'usual'}" for us, shape in found[:4])
        usual = next((us for us, shape in found if shape is None), 0.0)
        print(f"{kind} {name} m={m}: bytes {floor:.1f} us; {best}; usual {usual:.1f}", flush=True)
        facts = {"format": kind, "product": name, "rows": m, "bytes_us": floor, "kernel": "packed_few"}
        report += [{**facts, "us": us, "shape": shape} for us, shape in found]
    return report


def timed_all(tries: list[tuple[Any, list[Callable[[], Any]]]]) -> list[tuple[float, Any]]:
    """The times of these, the fastest first; what cannot be compiled or launched is said and left out."""
    with precompiled():
        for _, runs in tries:
            runs[0]()
    found = []
    for shape, runs in tries:
        try:
            found.append((timed(runs), shape))
        except Exception as error:  # Triton's errors have no class in common with the driver's
            print("failed", shape, type(error).__name__, str(error)[:200].replace("\n", " "))
    return sorted(found, key=lambda each: each[0])


def sweep(names: list[str], rows: list[int], kinds: list[str]) -> list[dict[str, Any]]:
    report = []
    for kind, name, m in itertools.product(kinds, names, rows):
        outputs, inputs = SIZES[name]
        weights = copies_of(packed(outputs, inputs, *FORMATS[kind]))
        x = torch.randn(m, inputs, device="cuda", dtype=torch.bfloat16)
        tries = shapes_to_try(m, outputs, inputs)
        found = timed_all([(shape, [partial(product, x, w, shape) for w in weights]) for shape in tries])
        floor = size_of(weights[0]) / TB_S * 1e6
        best = "; ".join(f"{us:.1f} {tuple(shape)}" for us, shape in found[:6])
        print(
            f"{kind} {name} m={m}: bytes {floor:.1f} us; {best}; worst of {len(found)} {found[-1][0]:.1f}", flush=True
        )
        facts = {"format": kind, "product": name, "rows": m, "bytes_us": floor}
        report += [{**facts, "us": us, "shape": shape} for us, shape in found]
    return report


def table(rows: list[int], kinds: list[str]) -> list[dict[str, Any]]:
    report = []
    for name, (outputs, inputs) in SIZES.items():
        plain = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        xs = {m: torch.randn(m, inputs, device="cuda", dtype=torch.bfloat16) for m in rows}
        usual = {m: timed([partial(F.linear, x, w) for w in plain]) for m, x in xs.items()}
        facts = {"product": name, "bytes_us": plain[0].nbytes / TB_S * 1e6}
        report += [{"format": "bfloat16, cuBLAS", "rows": m, "us": us, **facts} for m, us in usual.items()]
        print(
            name,
            "bfloat16:",
            {m: round(us, 1) for m, us in usual.items()},
            f"bytes {facts['bytes_us']:.1f}",
            flush=True,
        )
        weights = {kind: copies_of(packed(outputs, inputs, *FORMATS[kind])) for kind in kinds}
        with precompiled():
            for kind in kinds:
                for x in xs.values():
                    kernel.packed_linear(x, weights[kind][0])
        for kind in kinds:
            found = {m: timed([partial(kernel.packed_linear, x, w) for w in weights[kind]]) for m, x in xs.items()}
            facts["bytes_us"] = size_of(weights[kind][0]) / TB_S * 1e6
            report += [{"format": kind, "rows": m, "us": us, **facts} for m, us in found.items()]
            shown = ", ".join(f"m={m} {us:.1f} us ({usual[m] / us:.2f} x)" for m, us in found.items())
            print(f"   {kind}: {shown}; bytes {facts['bytes_us']:.1f}", flush=True)
    return report


def check() -> None:
    """What is timed is right."""
    cases = [
        (kind, packed(512, 1024, *form), torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16), swap, asm)
        for (kind, form), m, swap, asm in itertools.product(FORMATS.items(), (16, 64), (False, True), (False, True))
    ]

    def run(x: Tensor, weight: PackedWeight, swap: bool, asm: bool) -> Tensor:
        return product(x, weight, Shape(x.shape[0], 64, 2, 4, 2, swap, asm))

    with precompiled():
        for _, weight, x, swap, asm in cases:
            run(x, weight, swap, asm)
    for kind, weight, x, swap, asm in cases:
        values = reference.decode(weight, torch.float32)
        error = float(
            (run(x, weight, swap, asm).float() - x.float() @ values.t()).abs().max() / values.norm(dim=1).max()
        )
        if not error < 0.03:
            print("WRONG", kind, len(x), swap, asm, error)
        wrong = float((kernel.decode(weight, torch.float32) - values).abs().max())
        if not wrong < 1e-3:
            print("WRONG decoding", kind, wrong)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 2048])
    parser.add_argument("--products", nargs="+", default=list(SIZES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--sweep", action="store_true", help="the shapes of the packed kernel")
    parser.add_argument("--few", action="store_true", help="the shapes of kernels/packed_few, beside what is used else")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    check()
    if arguments.few:
        found = few_rows(arguments.products, arguments.rows, arguments.formats)
    elif arguments.sweep:
        found = sweep(arguments.products, arguments.rows, arguments.formats)
    else:
        found = table(arguments.rows, arguments.formats)
    keep(found, arguments.json)


if __name__ == "__main__":
    main()
