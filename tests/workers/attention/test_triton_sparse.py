"""Attention to chosen tokens by the Triton kernels gives what plain torch gives: decodes, prompts, chunks and padding in one step."""

from dataclasses import replace

import pytest
import torch
from small_models import BLOCK, batch_of

pytest.importorskip("triton")

from meshlm.kernels.attention.kernel import Columns
from meshlm.workers.attention import triton_latent
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.attention.triton_latent import LatentWorkspace, TritonSparseAttention
from meshlm.workers.batch import UNKNOWN, LayerCache
from meshlm.workers.layers.ops import LatentShape, LayerStep, TorchOps

if torch.cuda.is_available():
    pytest.skip("by the interpreter; tests/workers/cuda has the GPU", allow_module_level=True)

HEADS, NOPE, ROTARY, WIDE, RANK, DIM, BLOCKS = 4, 16, 16, 32, 24, 32, 40
REQUESTS = [(9, 1), (19, 1), (12, 3), (0, 4)]  # start and tokens
PADDING = 2
CPU = torch.device("cpu")


@pytest.mark.parametrize("topk", [4, 64])
def test_a_step(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer tokens chosen than some queries see, and with all; some queries at a time."""
    monkeypatch.setattr(triton_latent, "MOST_SCORES", 5 * 6 * BLOCK)
    torch.manual_seed(0)
    order = torch.randperm(BLOCKS).tolist()
    parts = [([1] * count, start, order[6 * nth : 6 * nth + 6]) for nth, (start, count) in enumerate(REQUESTS)]
    batch = batch_of(parts)
    num = len(batch.input_ids)
    weights = torch.randn(HEADS * (NOPE + WIDE), RANK) * 0.3
    heads = LatentShape(weights, (NOPE, ROTARY, WIDE), (torch.rand(RANK) + 0.5, 1e-6), TorchOps())
    query, latent = torch.randn(num, HEADS, NOPE + ROTARY), torch.randn(num, RANK + ROTARY)
    chosen = Chosen(torch.randn(num, 6, DIM), torch.randn(num, DIM), torch.randn(num, 6), topk)
    table, pages = torch.randn(64, ROTARY), torch.randn(BLOCKS, BLOCK, 1, RANK + ROTARY + DIM)
    theirs = pages.clone()
    plain, of_layer = TorchAttention(batch, BLOCK), LayerStep(TorchOps(), batch, table, LayerCache(theirs, theirs))
    expected = plain.attend_latent(query.clone(), latent.clone(), of_layer, heads, 0.2, chosen)
    TorchOps().latent_cache(query, latent, batch, table, LayerCache(pages, pages), heads)
    counts = torch.tensor([count for _, count in REQUESTS])
    columns = Columns(
        torch.arange(len(REQUESTS), dtype=torch.int32),
        torch.tensor([start for start, _ in REQUESTS], dtype=torch.int32),
        counts.cumsum(0).int(),
        len(REQUESTS),
        batch.block_tables[0].int(),
    )
    more = torch.zeros(PADDING, dtype=torch.int64)  # as a mixed graph has it: any positions, slots below 0
    step = replace(
        batch, columns=columns, lens=None, num_decodes=UNKNOWN, positions=torch.cat((batch.positions, more + 7))
    )

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.full((PADDING, *x.shape[1:]), torch.nan)))

    asks = Chosen(padded(chosen.query), padded(chosen.key), padded(chosen.weights), topk)
    slots = torch.cat((batch.slot_mapping[0], more - 1))
    attention = TritonSparseAttention(step, LatentWorkspace(CPU))
    found = attention.attend(padded(query), asks, slots, pages.squeeze(2), columns, heads, 0.2)
    torch.testing.assert_close(found[:num], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pages, theirs, atol=2e-5, rtol=1e-4)
    # A layer that shares the choice: the lines of its own cache are left as they are behind the latents.
    query, latent = query.flip(2), latent.flip(0)
    expected = plain.attend_latent(query.clone(), latent.clone(), of_layer, heads, 0.2, LastChoice())
    TorchOps().latent_cache(query, latent, batch, table, LayerCache(pages, pages), heads)
    found = attention.attend(padded(query), LastChoice(), slots, pages.squeeze(2), columns, heads, 0.2)
    torch.testing.assert_close(found[:num], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pages, theirs, atol=2e-5, rtol=1e-4)
