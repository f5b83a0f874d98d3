"""The embedding kernel against torch's gather (and the norm kernel after it), on the GPU that is there.

    python -P -m meshlm.kernels.embedding.bench [--json FILE]

Bytes counted: each row read once, written once, and its norm written once. Tables of Qwen3-0.6B and Llama-3.1-8B.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from meshlm.kernels.embedding.kernel import embed
from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.norm.kernel import rms_norm

TABLES = [(151936, 1024), (128256, 4096)]
TOKENS = [1, 16, 64, 256, 2048, 8192]


def bench(rows: int, columns: int, tokens: int) -> dict[str, Any]:
    table = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(rows, (tokens,), device="cuda")
    norm = (weight, 1e-6)

    def fused() -> None:
        embed(ids, table, norm)

    def torch_then_norm() -> None:
        rms_norm(F.embedding(ids, table), *norm)

    def gather() -> None:
        embed(ids, table)

    def torch_gather() -> None:
        F.embedding(ids, table)

    result: dict[str, Any] = {"table": [rows, columns], "tokens": tokens}
    for run in (fused, torch_then_norm, gather, torch_gather):
        result[f"{run.__name__}_us"] = round(microseconds(run), 2)
    result["fused_tb_s"] = round(3 * tokens * columns * 2 / result["fused_us"] / 1e6, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    arguments = parser.parse_args()
    report((bench(rows, columns, tokens) for rows, columns in TABLES for tokens in TOKENS), arguments.json)


if __name__ == "__main__":
    main()
