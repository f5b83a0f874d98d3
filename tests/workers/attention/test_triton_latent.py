"""Latent attention of a step by the Triton kernels gives what plain torch gives: decodes, prompts, chunks, and graphs' mixtures."""

from dataclasses import replace

import pytest
import torch
from small_models import BLOCK, batch_of

pytest.importorskip("triton")

from meshlm.kernels.attention.kernel import Columns
from meshlm.workers.attention import triton_latent
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.attention.triton_latent import LatentWorkspace, TritonLatentAttention
from meshlm.workers.batch import UNKNOWN, KnownRequests, LayerCache, Prompt, StepInputs
from meshlm.workers.engine.triton_inputs import halves_of
from meshlm.workers.layers.ops import LatentShape, LayerStep, TorchOps

if torch.cuda.is_available():
    pytest.skip("by the interpreter; tests/workers/cuda has the GPU", allow_module_level=True)

HEADS, NOPE, ROTARY, WIDE, RANK, BLOCKS = 4, 16, 16, 32, 24, 40
CPU = torch.device("cpu")
DECODES, CHUNKS, PROMPTS = [(9, 1), (0, 1)], [(7, 5), (12, 3)], [(0, 9), (0, 4)]  # start and tokens


def columns_of(batch: StepInputs, requests: list[tuple[int, int]]) -> StepInputs:
    """The same step as columns."""
    counts = torch.tensor([count for _, count in requests])
    starts = torch.tensor([start for start, _ in requests], dtype=torch.int32)
    rows, ends = torch.arange(len(requests), dtype=torch.int32), counts.cumsum(0).int()
    columns = Columns(rows, starts, ends, len(requests), batch.block_tables[0].int())
    return replace(batch, columns=columns, lens=None)


@pytest.mark.parametrize("projected_up", ["no", "with absorbed contexts", "yes"])
@pytest.mark.parametrize(
    "requests",
    [DECODES, PROMPTS, DECODES + PROMPTS, CHUNKS, DECODES + CHUNKS + PROMPTS],
    ids=["decodes", "prompts", "decodes and prompts", "chunks", "all"],
)
def test_a_step(requests: list[tuple[int, int]], projected_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_latent, "DENSE_FROM", 1000 if projected_up == "no" else 1)
    monkeypatch.setattr(triton_latent, "FEW_CONTEXTS", 8 if projected_up == "yes" else 0)
    monkeypatch.setattr(triton_latent, "PIECE", 2 * BLOCK)
    torch.manual_seed(0)
    order = torch.randperm(BLOCKS).tolist()
    parts = [([1] * count, start, order[6 * nth : 6 * nth + 6]) for nth, (start, count) in enumerate(requests)]
    batch = batch_of(parts)
    tokens, line = len(batch.input_ids), RANK + ROTARY
    weights = torch.randn(HEADS * (NOPE + WIDE), RANK) * 0.3
    heads = LatentShape(weights, (NOPE, ROTARY, WIDE), (torch.rand(RANK) + 0.5, 1e-6), TorchOps())
    query, latent = torch.randn(tokens, HEADS, NOPE + ROTARY), torch.randn(tokens, line)
    table, pages = torch.randn(64, ROTARY), torch.randn(BLOCKS, BLOCK, 1, line)

    def torchs() -> tuple[torch.Tensor, torch.Tensor]:
        cache = LayerCache(pages.clone(), pages)
        attention = TorchAttention(batch, BLOCK)
        cache = LayerCache(cache.keys, cache.keys)
        given = (query.clone(), latent.clone(), LayerStep(TorchOps(), batch, table, cache), heads, 0.2)
        return attention.attend_latent(*given), cache.keys

    expected, kept = torchs()
    steps = columns_of(batch, requests)
    mine, theirs = query.clone(), latent.clone()
    TorchOps().latent_cache(mine, theirs, batch, table, LayerCache(pages, pages), heads)
    assert torch.equal(pages, kept)
    begins = [sum(count for _, count in requests[:row]) for row in range(len(requests))]
    prompts = [Prompt(row, requests[row][0], begins[row], requests[row][1]) for row in range(len(requests))]
    decodes = batch.num_decodes
    known = replace(steps, known=KnownRequests(decodes, decodes, tuple(prompts[decodes:])))

    def attended(step: StepInputs, part: slice) -> torch.Tensor:
        assert step.columns is not None
        attention = TritonLatentAttention(step, LatentWorkspace(CPU), AuxStream(CPU))
        return attention.attend(mine[part], theirs[part], pages.squeeze(2), step.columns, heads, 0.2)

    for step in (known, replace(steps, num_decodes=UNKNOWN)):
        torch.testing.assert_close(attended(step, slice(None)), expected, atol=2e-5, rtol=1e-4)
    has_all = (
        requests == DECODES + CHUNKS + PROMPTS
    )  # a cut behind the first token, within a chunk, before the last token
    for cut in {1, tokens // 2, tokens - 1} if has_all else {tokens // 2}:
        halves = halves_of(known, cut)
        found = torch.cat([attended(halves[0], slice(cut)), attended(halves[1], slice(cut, None))])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("starts", [[0], [9], [20, 0, 3]])
def test_few_decodes(starts: list[int]) -> None:
    """Three launches give what plain torch gives, and leave the same lines in the cache."""
    torch.manual_seed(0)
    parts = [([1], start, [6 * nth + page for page in range(6)]) for nth, start in enumerate(starts)]
    batch, tokens = batch_of(parts), len(starts)
    weights = torch.randn(HEADS * (NOPE + WIDE), RANK) * 0.3
    heads = LatentShape(weights, (NOPE, ROTARY, WIDE), (torch.rand(RANK) + 0.5, 1e-6), TorchOps())
    both = torch.randn(tokens, HEADS * (NOPE + ROTARY) + RANK + ROTARY)  # as projected: lines are strided
    query, latent = both[:, : -RANK - ROTARY].view(tokens, HEADS, -1), both[:, -RANK - ROTARY :]
    table, pages = torch.randn(64, ROTARY), torch.randn(BLOCKS, BLOCK, 1, RANK + ROTARY)
    cache = LayerCache(pages.clone(), pages)
    cache = LayerCache(cache.keys, cache.keys)
    given = (query.clone(), latent.clone(), LayerStep(TorchOps(), batch, table, cache), heads, 0.2)
    expected = TorchAttention(batch, BLOCK).attend_latent(*given)
    step = columns_of(batch, [(start, 1) for start in starts])
    assert step.columns is not None
    attention = TritonLatentAttention(step, LatentWorkspace(CPU), AuxStream(CPU))
    assert attention.is_few(step.columns)
    lines = pages.squeeze(2)
    out = attention.attend_few(query, latent, table, batch.slot_mapping[0], lines, step.columns, heads, 0.2)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pages, cache.keys, atol=2e-5, rtol=1e-4)
    assert not attention.is_few(Columns(*(torch.zeros(9, dtype=torch.int32),) * 3, 9, step.columns.blocks))
