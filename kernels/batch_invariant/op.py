"""The records of batch-invariant products and attention, beside those of a server without --deterministic."""

import torch
import torch.nn.functional as F

from meshlm.kernels.attention import reference
from meshlm.kernels.attention.kernel import Extras
from meshlm.kernels.attention.requests import PagedStep
from meshlm.kernels.batch_invariant import attention as invariant
from meshlm.kernels.batch_invariant.gemm import Tile, gemm
from meshlm.kernels.gemm import kernel as products
from meshlm.kernels.op import Case, Launch, Op

PAGE = 16
Heads = tuple[int, int, int]  # of queries, of keys, numbers of each
ROWS = (1, 16, 64, 128, 256, 2048)
SHAPES: list[Case] = [
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),  # of Llama-3.1-8B
    *((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144)),  # of Qwen3-1.7B
]
HEADS: list[Heads] = [(32, 8, 128), (16, 8, 128)]
DECODES: list[Case] = [
    (1, 1, 1023),
    (16, 1, 1023),
    (64, 1, 1023),
    (64, 1, 4095),
    (256, 1, 1023),
]  # requests, tokens, those before
PROMPTS: list[Case] = [(1, 512), (1, 2048), (1, 8192)]
TILES = [
    Tile(64, block_n, block_k, 4, stages)
    for block_n in (64, 128, 256)
    for block_k, stages in ((64, 4), (64, 6), (128, 3), (128, 4))
    if (64 + block_n) * block_k * 2 * stages <= 200 << 10
]


def _gemm(
    dtype: torch.dtype, device: torch.device, rows: int, outputs: int, inputs: int, bias: bool = False,
    tile: Tile | None = None,
) -> Launch:  # fmt: skip
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    w = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    b = torch.randn(outputs, device=device, dtype=dtype) if bias else None

    def expected() -> torch.Tensor:
        return F.linear(x.float(), w.float(), None if b is None else b.float())

    beside = {"gemm": lambda: products.gemm(x, w, b)}
    return Launch(lambda: gemm(x, w, b, tile=tile), expected, w.nbytes, 2 * rows * w.numel(), beside)


def _attention(
    dtype: torch.dtype, device: torch.device, n: int, tokens: int, heads: Heads, start: int = 0, window: int = 0
) -> Launch:
    """Requests of so many tokens behind those of earlier steps; of one token as decodes."""
    num, kv_heads, dim = heads
    step = PagedStep.random([(start, tokens)] * n, heads, PAGE, dtype, device)
    workspace, out = invariant.Workspace(device), torch.empty_like(step.query)

    def run() -> torch.Tensor:
        invariant.attention(
            *step[:4], dim**-0.5, out, workspace, longest=start + tokens, decodes=tokens == 1, window=window
        )
        return out

    def expected() -> torch.Tensor:
        return reference.attention(*step[:4], dim**-0.5, Extras(window=window))

    pairs = (start + tokens / 2) * tokens
    read = n * (start + tokens) * 2 * kv_heads * dim * step.keys.element_size()
    return Launch(run, expected, read if tokens == 1 else 0, 0 if tokens == 1 else n * 4 * pairs * num * dim)


OPS = (
    Op(
        "batch_invariant_gemm", _gemm, [(1, 40, 24), (5, 136, 1040, True), (130, 72, 2056, True), (66, 128, 1024)],
        [(rows, *shape) for shape in SHAPES for rows in ROWS], near=2,
        candidates=lambda case: TILES if case[0] <= 64 else (),
    ),
    Op(
        "batch_invariant_attention", _attention, near=2,
        cases=[
            (3, 1, (4, 2, 64), 600), (2, 33, (6, 2, 48), 20), (1, 70, (3, 1, 16), 500), (1, 5, (8, 1, 80), 1030, 600),
            (2, 1, (4, 4, 32), 700, 100),
        ],
        of_models=[(*case[:2], heads, *case[2:]) for heads in HEADS for case in (*DECODES, *PROMPTS)],
    ),
)  # fmt: skip
