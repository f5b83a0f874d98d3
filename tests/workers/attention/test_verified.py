"""Steps that verify drafts: each draft sees those before it, as the tokens of a chunk do, in whole steps, graphs and halves."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from small_models import BLOCK, batch_of
from torch import Tensor

pytest.importorskip("triton")

from meshlm.kernels.attention import tiles
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.workers.attention import triton_backend
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.attention.triton_backend import TritonAttention, Workspace
from meshlm.workers.attention.triton_latent import LatentWorkspace
from meshlm.workers.batch import UNKNOWN, KnownRequests, LayerCache, Prompt, StepInputs
from meshlm.workers.engine.triton_inputs import halves_of
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep, TorchOps

if torch.cuda.is_available():
    pytest.skip("by the interpreter; tests/workers/cuda has the GPU", allow_module_level=True)

CPU, PAGES, QUERIES = torch.device("cpu"), 60, 5
Request = tuple[int, int]  # start and tokens
VERIFIED: list[Request] = [(9, 4), (0, 1), (17, 5), (6, 2), (3, 1)]
PROMPTS: list[Request] = [(7, 5), (0, 9), (2, 1)]


class Ops(TorchOps):
    """Queries as a kernel leaves them, in one piece; the keys in the projection are rotated, too."""

    def rope_cache(
        self, qkv: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        slots = batch.slot_mapping[cache.group]
        return rope_cache(qkv, batch.positions, slots, table, None, 0.0, cache.keys, cache.values, heads.num_heads)


class Verifying(NamedTuple):
    """A step as plain torch takes it, requests as they are, and as the kernels take it."""

    plain: StepInputs
    step: StepInputs
    size: int  # requests, of which the first few are verified


def columns(requests: list[Request], blocks: Tensor, first_row: int = 0, before: int = 0) -> Columns:
    rows = torch.arange(first_row, first_row + len(requests), dtype=torch.int32)
    starts = torch.tensor([start for start, _ in requests], dtype=torch.int32)
    ends = before + torch.tensor([count for _, count in requests]).cumsum(0)
    return Columns(rows, starts, ends.int(), len(requests), blocks)


def joined(*some: Columns) -> Columns:
    rows, starts, ends = (torch.cat([getattr(of, name) for of in some]) for name in ("rows", "starts", "ends"))
    return Columns(rows, starts, ends, len(rows), some[0].blocks)


def nobody(padding: int, tokens: int, blocks: Tensor) -> Columns:
    zeros = torch.zeros(padding, dtype=torch.int32)
    return Columns(zeros, zeros, zeros + tokens, padding, blocks)


def verifying(requests: list[Request], prompts: list[Request], padding: int = 0) -> Verifying:
    """padding: entries of the verified, and of the columns, that have no tokens."""
    torch.manual_seed(0)
    order = torch.randperm(PAGES).tolist()
    both = requests + prompts
    parts = [([1] * count, start, order[6 * nth : 6 * nth + 6]) for nth, (start, count) in enumerate(both)]
    plain = batch_of(parts)
    assert plain.lens is not None
    # as if nothing decoded: all are requests with several tokens
    counts, lens = tuple(count for _, count in both), plain.lens.seq_lens
    chunks = replace(plain.lens, query_lens=counts, context_lens=tuple(lens.tolist()), max_decode_len=0)
    plain, blocks = replace(plain, num_decodes=0, lens=chunks), plain.block_tables[0].int()
    tokens = sum(count for _, count in requests)
    each = [(row, start + nth) for row, (start, count) in enumerate(requests) for nth in range(count)]
    rows, starts = (torch.tensor(column, dtype=torch.int32) for column in zip(*each, strict=True))
    one_each = Columns(rows, starts, torch.arange(1, tokens + 1, dtype=torch.int32), tokens, blocks)
    empty = nobody(padding, tokens, blocks)
    checked, given = joined(columns(requests, blocks), empty), joined(one_each, empty)
    found: list[Prompt] = []
    if prompts:
        given = joined(one_each, columns(prompts, blocks, len(requests), tokens))
        for row, (start, count) in enumerate(prompts, len(requests)):
            found.append(Prompt(row, start, tokens + sum(one.num_tokens for one in found), count))
    step = replace(
        plain, lens=None, columns=given, num_decodes=tokens + (0 if prompts else padding), verified=checked,
        queries=QUERIES, block_tables=(blocks,), known=KnownRequests(tokens, tokens, tuple(found)),
    )  # fmt: skip
    return Verifying(plain, step, len(both))


STEPS = {
    "all verified": verifying(VERIFIED, []),
    "with padding": verifying(VERIFIED, [], 3),
    "beside prompts": verifying(VERIFIED, PROMPTS),
}


@pytest.fixture(autouse=True)
def two_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiles, triton_backend):
        monkeypatch.setattr(module, "decode_tiles", lambda *_: (2, 16, 1, 1))  # else the GPU says


def steps_of(given: Verifying) -> list[list[tuple[StepInputs, slice]]]:
    """The step as it is launched, as a graph has it where prompts are not known, and in two halves."""
    tokens = len(given.step.input_ids)
    unknown = replace(given.step, num_decodes=UNKNOWN, known=None)
    found = [[(given.step, slice(None))], [(unknown, slice(None))]]
    for cut in (7, tokens - 1):  # within a request, before the last token
        found.append(list(zip(halves_of(given.step, cut), (slice(cut), slice(cut, None)), strict=True)))
    return found


def triton(step: StepInputs) -> TritonAttention:
    return TritonAttention(step, BLOCK, Workspace(CPU, 4096), AuxStream(CPU), LatentWorkspace(CPU))


HEADS = [((4, 2, 16), 0, 0), ((6, 1, 32), 6, 0), ((3, 3, 16), 0, 8)]


@pytest.mark.parametrize(
    ("name", "heads", "window", "chunk"),
    [*(("beside prompts", *heads) for heads in HEADS), ("with padding", *HEADS[0]), ("all verified", *HEADS[1])],
)
def test_heads(name: str, heads: tuple[int, int, int], window: int, chunk: int) -> None:
    torch.manual_seed(1)
    given, (num, kv_heads, dim) = STEPS[name], heads
    shape = AttentionShape(num, kv_heads, dim, None, 0.0, chunk=chunk)
    qkv = torch.randn(len(given.plain.input_ids), (num + 2 * kv_heads) * dim)
    table, memory = torch.randn(64, dim), torch.randn(2, PAGES, BLOCK, kv_heads, dim)
    cache, ops = LayerCache(*memory.clone()), Ops()
    layer = LayerStep(TorchOps(), given.plain, table, cache)
    expected = TorchAttention(given.plain, BLOCK).attend(qkv.clone(), layer, shape, 0.3, window)
    for parts in steps_of(given):
        own, found = LayerCache(*memory.clone()), []
        for step, part in parts:
            layer = LayerStep(ops, step, table, own)
            found.append(triton(step).attend(qkv[part].clone(), layer, shape, 0.3, window))
        torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(own.keys, cache.keys)


@pytest.mark.parametrize("name", STEPS)
def test_latents(name: str) -> None:
    torch.manual_seed(1)
    num, nope, rotary, wide, rank = 4, 16, 16, 32, 24
    given, ops = STEPS[name], TorchOps()
    weights = torch.randn(num * (nope + wide), rank) * 0.3
    heads = LatentShape(weights, (nope, rotary, wide), (torch.rand(rank) + 0.5, 1e-6), ops)
    tokens = len(given.plain.input_ids)
    query, latent = torch.randn(tokens, num, nope + rotary), torch.randn(tokens, rank + rotary)
    table, pages = torch.randn(64, rotary), torch.randn(PAGES, BLOCK, 1, rank + rotary)
    kept = pages.clone()
    layer = LayerStep(ops, given.plain, table, LayerCache(kept, kept))
    expected = TorchAttention(given.plain, BLOCK).attend_latent(query.clone(), latent.clone(), layer, heads, 0.2)
    for parts in steps_of(given):
        own, found = pages.clone(), []
        for step, part in parts:
            layer = LayerStep(ops, step, table, LayerCache(own, own))
            found.append(triton(step).attend_latent(query[part].clone(), latent[part].clone(), layer, heads, 0.2))
        torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(own, kept)
