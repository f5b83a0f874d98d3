"""Mamba's kernels on the GPU that is there: decodes beside a copy of their states, prompts by the exponentials that they need at least.

    python -P -m meshlm.kernels.selective_scan.bench [--json FILE] [--reference]

Bytes of a decode: each state read once and written once. A prompt needs an exponential of each number of the state of each token.
Shapes of Mamba-2.8B and Falcon-Mamba-7B. --reference: beside them mamba_ssm's kernel, where that package is installed.
"""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.selective_scan.kernel import scan_update, selective_scan
from meshlm.kernels.ssd.bench import PAGE, beside_copy, columns_of, launch
from meshlm.kernels.states import Pieces

SHAPES, N = {"mamba-2.8b": 5120, "falcon-mamba-7b": 8192}, 16
DECODES, PROMPTS = (1, 16, 64, 256), ([256], [2048], [2048] * 4, [8192])


def inputs(tokens: int, pages: int, channels: int, dtype: torch.dtype) -> list[Any]:
    x, dt, gate = torch.randn(3, tokens, channels, device="cuda", dtype=torch.bfloat16).unbind()
    b, c = torch.randn(2, tokens, N, device="cuda", dtype=torch.bfloat16).unbind()
    a, d = -torch.rand(channels, N, device="cuda") * 4, torch.randn(channels, device="cuda")
    state = torch.randn(2, pages, channels // 2, 1, N, device="cuda").to(dtype)
    return [x, dt, a, b, c, d, gate, state, torch.empty_like(x)]


def decode(name: str, requests: int, dtype: torch.dtype) -> dict[str, Any]:
    at, given = columns_of([1] * requests, 1000), inputs(requests, 2 * requests, SHAPES[name], dtype)
    taken = microseconds(lambda: launch(scan_update, *given, at, requests, PAGE))
    return {"what": f"decode {name} {requests} {str(dtype)[6:]}", **beside_copy(taken, given[7].nbytes // 2)}


def prompts(name: str, counts: list[int]) -> dict[str, Any]:
    at, tokens = columns_of(counts, 0), sum(counts)
    pieces = Pieces.of([(n, 0, count) for n, count in enumerate(counts)], PAGE, torch.device("cuda"))
    given = inputs(tokens, 2 * len(counts), SHAPES[name], torch.bfloat16)
    taken = microseconds(lambda: launch(selective_scan, *given, at, pieces, PAGE))
    what = f"prompts of {counts[0]} {name}: {len(counts)}"
    return {"what": what, "us": round(taken, 2), "gexp_s": round(tokens * SHAPES[name] * N / taken / 1e3, 1)}


def reference(name: str, tokens: int) -> dict[str, Any]:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # type: ignore[import-not-found]

    x, dt, a, b, c, d, gate, _, _ = inputs(tokens, 2, SHAPES[name], torch.bfloat16)
    x, dt, b, c, gate = (each.t().contiguous()[None] for each in (x, dt, b, c, gate))

    def run() -> None:
        selective_scan_fn(x, dt, a, b, c, d, gate, delta_softplus=True, return_last_state=True)

    return {"what": f"mamba_ssm, a prompt of {tokens} {name}", "us": round(microseconds(run), 2)}


def measured(has_reference: bool) -> Iterator[dict[str, Any]]:
    for name in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for requests in DECODES:
                yield decode(name, requests, dtype)
        for counts in PROMPTS:
            yield prompts(name, counts)
            if has_reference and find_spec("mamba_ssm") and len(counts) == 1:
                yield reference(name, counts[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--reference", action="store_true")
    arguments = parser.parse_args()
    report(measured(arguments.reference), arguments.json)


if __name__ == "__main__":
    main()
