"""Products of few rows against the time of reading the weight, on the GPU that is there, and against cuBLAS.

    python -P -m meshlm.kernels.gemv.bench [--tune] [--json FILE]

Many copies of each weight take turns, so that none is read from the cache.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshlm.kernels.attention.bench import microseconds
from meshlm.kernels.gemv.kernel import gemv, shape_of

# outputs, inputs, gate, norm; Qwen3-0.6B, then Llama-3.1-8B
SHAPES = [
    (4096, 1024, False, True),
    (1024, 2048, False, False),
    (3072, 1024, True, True),
    (1024, 3072, False, False),
    (6144, 4096, False, True),
    (4096, 4096, False, False),
    (14336, 4096, True, True),
    (4096, 14336, False, False),
]
CHOICES = [
    (1, 512, 1), (1, 1024, 2), (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (2, 512, 2), (2, 1024, 2),
    (2, 1024, 4), (2, 2048, 4), (2, 2048, 8), (4, 512, 4), (4, 1024, 4), (4, 2048, 8), (8, 512, 4), (8, 512, 8),
]  # fmt: skip


def bench(shape: tuple[int, int, bool, bool], rows: int, tune: bool) -> dict[str, Any]:
    outputs, inputs, gate, norm = shape
    lines = outputs * (2 if gate else 1)
    copies = max(4, (256 << 20) // (lines * inputs * 2))
    weights = torch.randn(copies, lines, inputs, device="cuda", dtype=torch.bfloat16)
    x, residual = torch.randn(2, rows, inputs, device="cuda", dtype=torch.bfloat16)
    norm_weight = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"norm": norm_weight, "residual": residual, "eps": 1e-6} if norm else {}
    choices = [shape_of(outputs, inputs, gate)]
    if tune:
        choices += CHOICES
    found = []
    for choice in choices:

        def run(c: tuple[int, int, int] = choice) -> None:
            for weight in weights:
                gemv(x, weight, gate=gate, shape=c, **options)

        found.append((microseconds(run, 5) / copies, choice))

    def library() -> None:
        for weight in weights:
            F.linear(x, weight)

    result: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "gate": gate, "rows": rows}
    result["default_us"] = round(found[0][0], 2)
    result["tb_s"] = round(lines * inputs * 2 / found[0][0] / 1e6, 2)
    result["cublas_us"] = round(microseconds(library, 5) / copies, 2)
    if tune:
        result["best"] = [(round(us, 2), choice) for us, choice in sorted(found)[:4]]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    for rows in arguments.rows:
        for shape in arguments.shapes:
            results.append(bench(SHAPES[shape], rows, arguments.tune))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
