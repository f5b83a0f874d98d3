"""Truncation against reading the logits once at 4.2 TB/s, and against torch.sort, on the GPU that is there.

    python -P -m meshlm.kernels.top_k_top_p.bench [--tune] [--json FILE]

Logits are bfloat16. "zipf" looks like a model that knows what comes (the r-th likeliest token weighs r^-1.5), "flat"
like one that does not (normal, standard deviation 2: top-p keeps tens of thousands). Every run starts from fresh
logits; their copy is not counted.
"""

import argparse
import itertools
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.top_k_top_p.kernel import Limits, top_k_top_p, workspace

VOCAB = 151936
LINES = [1, 64, 256]
BYTES_PER_US = 4.2e6
# temperature, min_p, top_k, top_p
CASES = {
    "off": (1.0, 0.0, 0, 1.0),
    "min_p": (1.0, 0.05, 0, 1.0),
    "top_k": (1.0, 0.0, 50, 1.0),
    "top_p": (1.0, 0.0, 0, 0.9),
    "all": (0.7, 0.01, 50, 0.9),
}


def make_logits(kind: str, lines: int) -> Tensor:
    torch.manual_seed(0)
    logits = torch.randn(lines, VOCAB, device="cuda") * 2
    if kind == "zipf":
        ranks = torch.arange(1, 2001, device="cuda")
        likely = torch.rand(lines, VOCAB, device="cuda").topk(len(ranks)).indices
        logits.scatter_(1, likely, (20 - 1.5 * ranks.log()).expand(lines, -1))
    return logits.bfloat16()


def bench(kind: str, lines: int, case: str, tune: bool) -> dict[str, Any]:
    fresh = make_logits(kind, lines)
    logits = fresh.clone()
    temperature, min_p, top_k, top_p = CASES[case]
    state = Limits(
        torch.full((lines,), temperature, device="cuda"),
        torch.full((lines,), min_p, device="cuda"),
        torch.full((lines,), top_k, dtype=torch.int32, device="cuda"),
        torch.full((lines,), top_p, device="cuda"),
    )
    rows = torch.arange(lines, dtype=torch.int32, device="cuda")
    scratch = workspace(lines, VOCAB, logits.dtype, logits.device)

    def copy() -> None:
        logits.copy_(fresh)

    def sort() -> None:
        fresh.sort(dim=-1, descending=True)

    copying = microseconds(copy)
    choices: list[dict[str, int]] = [{}]
    if tune:
        choices += [
            {"block": block, "warps": warps} for block, warps in itertools.product((4096, 8192, 16384), (8, 16, 32))
        ]
        choices += [{"tile": 128}, {"tile": 512}, {"stages": 1}, {"stages": 4}]
    found: list[tuple[float, dict[str, int]]] = []
    for choice in choices:

        def run(choice: dict[str, int] = choice) -> None:
            copy()
            top_k_top_p(logits, rows, None, state, scratch, **choice)

        found.append((microseconds(run) - copying, choice))
    own = found[0][0]
    result: dict[str, Any] = {"logits": kind, "lines": lines, "case": case, "us": round(own, 1)}
    result["read_once_us"] = round(lines * VOCAB * 2 / BYTES_PER_US, 1)
    result["kept"] = round(float((logits > -torch.inf).sum()) / lines)
    if case == "all":
        result["torch_sort_us"] = round(microseconds(sort, 5), 1)
    if tune:
        found.sort(key=lambda one: one[0])
        result["best"] = [{"us": round(us, 1), **choice} for us, choice in found[:4]]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    cases = itertools.product(("zipf", "flat"), LINES, CASES)
    tune = arguments.tune
    report((bench(*each, tune and each[2] in ("top_k", "top_p")) for each in cases), arguments.json)


if __name__ == "__main__":
    main()
