"""The kernels of gated delta nets on the GPU that is there: decodes beside a copy of their states, prompts by their products.

    python -P -m meshlm.kernels.gated_delta.bench [--json FILE] [--reference]

Bytes of a decode: each state read once and written once. FLOP of a prompt: its products in chunks of 64. Qwen3-Next-80B-A3B's shape,
by Qwen3.5's as well. --reference: beside them the kernels of flash-linear-attention, where that package is installed.
"""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from meshlm.kernels.gated_delta.kernel import CHUNK, chunk_rule
from meshlm.kernels.gated_delta.update import rule_update
from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.ssd.bench import PAGE, beside_copy, columns_of, launch
from meshlm.kernels.states import Pieces

GROUPS, HEADS, K, V = 16, 32, 128, 128
DECODES, PROMPTS = (1, 16, 64, 256), ([256], [2048], [2048] * 4, [8192])


def inputs(tokens: int, pages: int, dtype: torch.dtype) -> list[Any]:
    q, k = torch.randn(2, tokens, GROUPS, K, device="cuda", dtype=torch.bfloat16).unbind()
    v = torch.randn(tokens, HEADS, V, device="cuda", dtype=torch.bfloat16)
    a, b = torch.randn(2, tokens, HEADS, device="cuda", dtype=torch.bfloat16).unbind()
    rate, bias = -torch.rand(HEADS, device="cuda") * 4, torch.randn(HEADS, device="cuda")
    state = torch.randn(2, pages, HEADS // 2, V, K, device="cuda").to(dtype)
    return [q, k, v, a, b, rate, bias, state, torch.empty_like(v)]


def decode(requests: int, dtype: torch.dtype) -> dict[str, Any]:
    at, given = columns_of([1] * requests, 1000), inputs(requests, 2 * requests, dtype)
    taken = microseconds(lambda: launch(rule_update, *given, at, requests, PAGE))
    return {"what": f"decode {requests} {str(dtype)[6:]}", **beside_copy(taken, given[7].nbytes // 2)}


def prompts(counts: list[int]) -> dict[str, Any]:
    at, tokens = columns_of(counts, 0), sum(counts)
    pieces = Pieces.of([(n, 0, count) for n, count in enumerate(counts)], PAGE, torch.device("cuda"))
    given = inputs(tokens, 2 * len(counts), torch.bfloat16)
    taken = microseconds(lambda: launch(chunk_rule, *given, at, pieces, PAGE))
    flop = 2 * HEADS * tokens * (CHUNK * (3 * K + 2 * V) + 3 * K * V)
    what = f"prompts of {counts[0]}: {len(counts)}"
    return {"what": what, "us": round(taken, 2), "tflop_s": round(flop / taken / 1e6, 1)}


def reference(tokens: int) -> dict[str, Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    q, k, v, a, b, rate, bias, _, _ = inputs(tokens, 2, torch.bfloat16)
    g = rate * torch.nn.functional.softplus(a.float() + bias)
    query, key = (each.repeat_interleave(HEADS // GROUPS, 1)[None] for each in (q, k))
    given = (query, key, v[None], g[None], b.float().sigmoid()[None])

    def run() -> None:
        chunk_gated_delta_rule(*given, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return {"what": f"flash-linear-attention, a prompt of {tokens}", "us": round(microseconds(run), 2)}


def measured(has_reference: bool) -> Iterator[dict[str, Any]]:
    for dtype in (torch.bfloat16, torch.float32):
        for requests in DECODES:
            yield decode(requests, dtype)
    for counts in PROMPTS:
        yield prompts(counts)
        if has_reference and find_spec("fla") and len(counts) == 1:
            yield reference(counts[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--reference", action="store_true")
    arguments = parser.parse_args()
    report(measured(arguments.reference), arguments.json)


if __name__ == "__main__":
    main()
