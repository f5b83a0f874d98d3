"""The kernels of Mamba-2 layers on the GPU that is there: a convolution and a scan of prompts, an update of decodes.

    python -P -m meshlm.kernels.ssd.bench [--json FILE] [--reference]

Bytes of a decode: each state read once and written once; beside it a copy of as many bytes. FLOP of a scan: its products in pieces.
--reference: beside them the kernels of mamba_ssm, and vLLM's, which are made of those, where these packages are installed. Shapes
of Bamba-9B and of Nemotron-H-8B.
"""

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.causal_conv.kernel import causal_conv
from meshlm.kernels.measure import microseconds, report
from meshlm.kernels.ssd.kernel import chunk_scan
from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.kernels.ssd.update import state_update
from meshlm.kernels.states import PIECE, Pieces

SHAPES = {"bamba-9b": (128, 64, 128, 1), "nemotron-h-8b": (128, 64, 128, 8)}  # heads, P, N, groups
REFERENCE_CHUNK = 256  # tokens of a piece
DECODES, PROMPTS, PAGE = (1, 16, 64, 256), (256, 2048, 8192), 1056


def columns_of(counts: list[int], start: int) -> Columns:
    n = len(counts)
    tables = torch.arange(n, dtype=torch.int32, device="cuda")[:, None].repeat(1, 16)  # each its own page
    rows, starts = (
        torch.arange(n, dtype=torch.int32, device="cuda"),
        torch.full((n,), start, dtype=torch.int32, device="cuda"),
    )
    ends = torch.tensor(counts, dtype=torch.int32, device="cuda").cumsum(0).int()
    return Columns(rows, starts, ends, n, tables)


def inputs(tokens: int, pages: int, name: str, dtype: torch.dtype) -> list[Any]:
    heads, width, numbers, groups = SHAPES[name]
    x = torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn(2, tokens, groups, numbers, device="cuda", dtype=torch.bfloat16).unbind()
    steps = TimeSteps(torch.randn(tokens, heads, device="cuda").bfloat16() - 3, torch.zeros(heads, device="cuda"))
    a = -torch.rand(heads, device="cuda")
    state = torch.randn(2, pages, heads // 2, width, numbers, device="cuda").to(dtype)
    return [x, steps, a, b, c, torch.ones(heads, device="cuda"), state, torch.empty_like(x)]


def launch(kernel: Callable[..., Any], *given: Any) -> None:
    kernel(*given)


def beside_copy(taken: float, size: int) -> dict[str, float]:
    """What a kernel that takes so many µs for reading and writing `size` bytes moves, and that in parts of what a copy does."""
    source, copy = torch.empty(2, max(size, 1 << 20), dtype=torch.uint8, device="cuda").unbind()
    copied = microseconds(lambda: launch(copy.copy_, source))
    moved = 2 * size / taken
    return {
        "us": round(taken, 2),
        "tb_s": round(moved / 1e6, 3),
        "of_copy": round(moved / (2 * len(source) / copied), 3),
    }


def decode(name: str, requests: int, dtype: torch.dtype) -> dict[str, Any]:
    at, given = columns_of([1] * requests, 1000), inputs(requests, 2 * requests, name, dtype)
    taken = microseconds(lambda: launch(state_update, *given, at, requests, PAGE))
    return {"what": f"decode {name} {requests} {str(dtype)[6:]}", **beside_copy(taken, given[6].nbytes // 2)}


def prompt(name: str, tokens: int) -> dict[str, Any]:
    at, pieces = columns_of([tokens], 0), Pieces.of([(0, 0, tokens)], PAGE, torch.device("cuda"))
    given = inputs(tokens, 2, name, torch.bfloat16)
    heads, width, numbers, _ = SHAPES[name]
    taken = microseconds(lambda: launch(chunk_scan, *given, at, pieces, PAGE))
    flop = 2 * heads * tokens * (PIECE * (numbers + width) + 2 * numbers * width)
    return {"what": f"scan {name} {tokens}", "us": round(taken, 2), "tflop_s": round(flop / taken / 1e6, 1)}


def convolution(name: str, counts: list[int]) -> dict[str, Any]:
    heads, width, numbers, groups = SHAPES[name]
    channels, tokens = heads * width + 2 * groups * numbers, sum(counts)
    x = torch.randn(tokens, channels + heads * width + heads, device="cuda", dtype=torch.bfloat16)[
        :, heads * width : -heads
    ]
    weight, bias = (
        torch.randn(channels, 4, device="cuda", dtype=torch.bfloat16),
        torch.randn(channels, device="cuda").bfloat16(),
    )
    state = torch.randn(2, 2 * len(counts), channels // 2, 3, device="cuda", dtype=torch.bfloat16)
    at, decodes = columns_of(counts, 0), len(counts) if tokens == len(counts) else 0
    pieces = (
        None if decodes else Pieces.of([(n, 0, count) for n, count in enumerate(counts)], PAGE, torch.device("cuda"))
    )
    taken = microseconds(lambda: launch(causal_conv, x, weight, bias, state, at, decodes, pieces, PAGE))
    what = f"conv {name} {f'{decodes} decodes' if decodes else tokens}"
    return {"what": what, "us": round(taken, 2), "tb_s": round(2 * tokens * channels * 2 / taken / 1e6, 3)}


def of_mamba_ssm(name: str, tokens: int) -> float:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    x, steps, a, b, c, d, _, _ = inputs(tokens, 1, name, torch.bfloat16)
    given = (x[None], steps.values()[None], a, b[None], c[None], REFERENCE_CHUNK)
    return microseconds(lambda: launch(mamba_chunk_scan_combined, *given, d))


def of_vllm(name: str, tokens: int) -> float:
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    x, steps, a, b, c, d, _, out = inputs(tokens, 1, name, torch.bfloat16)
    chunks = tokens // REFERENCE_CHUNK
    ends = torch.arange(chunks + 1, dtype=torch.int32, device="cuda") * REFERENCE_CHUNK
    last, sequences = ends[:1] + chunks - 1, torch.zeros(chunks, dtype=torch.int32, device="cuda")
    given = (x, steps.dt, a, b, c, REFERENCE_CHUNK, ends[:: max(1, chunks)], ends, last, sequences, out, d)

    def run() -> None:
        ssd_combined.mamba_chunk_scan_combined_varlen(
            *given, dt_bias=steps.bias, dt_softplus=True, state_dtype=torch.bfloat16
        )

    return microseconds(run)


REFERENCES = {"mamba_ssm": of_mamba_ssm, "vllm": of_vllm}


def measured(has_reference: bool) -> Iterator[dict[str, Any]]:
    for name in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for requests in DECODES:
                yield decode(name, requests, dtype)
        for tokens in PROMPTS:
            yield prompt(name, tokens)
            for package, timed in REFERENCES.items() if has_reference else ():
                if find_spec(package):
                    yield {"what": f"{package} scan {name} {tokens}", "us": round(timed(name, tokens), 2)}
        for counts in ([1] * 64, [2048], [2048] * 4):
            yield convolution(name, counts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--reference", action="store_true")
    arguments = parser.parse_args()
    report(measured(arguments.reference), arguments.json)


if __name__ == "__main__":
    main()
