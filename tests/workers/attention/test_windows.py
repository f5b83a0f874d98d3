"""Sliding windows in the backends of the CPU: what is before a window, and behind a row's end, is others', and never read."""

import pytest
import torch
from small_models import BLOCK, CPU, batch_of
from tiny_models import spec_of
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.protocol.kv import FullAttention, KVSpec, SlidingWindow
from meshlm.workers.attention.backend import choose
from meshlm.workers.attention.torch_backend import RotatedAttention
from meshlm.workers.batch import LayerCache, StepInputs

PARTS = [
    ([1], 9, [0, 1, 2]),
    ([1], 38, list(range(3, 13))),
    ([1] * 30, 0, list(range(13, 21))),
    ([1] * 7, 26, list(range(21, 30))),
]
QUERY = torch.randn(39, 4, 32, generator=torch.Generator().manual_seed(0))


def attended(backend: str, batch: StepInputs, cache: LayerCache, seen: Seen) -> Tensor:
    attention = choose(backend, spec_of(), CPU, torch.float32, BLOCK).step(batch, BLOCK)
    assert isinstance(attention, RotatedAttention)
    return attention.run(QUERY, cache, seen)


def of_others(spec: KVSpec) -> list[int]:
    """Slots that no token of PARTS sees."""
    seen = {
        table[at // BLOCK] * BLOCK + at % BLOCK
        for tokens, start, table in PARTS
        for at in range(spec.first_needed(BLOCK, start) * BLOCK, start + len(tokens))
    }
    return sorted(set(range(32 * BLOCK)) - seen)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("spec", [FullAttention(), *map(SlidingWindow, (5, 8, 13))], ids=str)
@pytest.mark.parametrize("cap", [0.0, 2.5])
def test_what_is_others_is_not_read(backend: str, spec: KVSpec, cap: float) -> None:
    """Two decodes of different lengths, a whole prompt, a later chunk: the same bits, whatever the other slots hold."""
    torch.manual_seed(1)
    seen = Seen(0.3, spec.window if isinstance(spec, SlidingWindow) else 0, cap)
    clean = LayerCache(*torch.randn(2, 32, BLOCK, 2, 32))
    expected = attended(backend, batch_of(PARTS), clean, seen)
    cache = LayerCache(clean.keys.clone(), clean.values.clone())
    for lines in cache.flat():
        lines[of_others(spec)] = torch.nan
    assert torch.equal(attended(backend, batch_of(PARTS), cache, seen), expected)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_layer_reads_by_the_table_of_its_group(backend: str) -> None:
    """The same keys and values, where another group's tables say that they are."""
    clean = LayerCache(*torch.randn(2, 32, BLOCK, 2, 32))
    order = torch.randperm(32)
    moved = LayerCache(torch.empty_like(clean.keys), torch.empty_like(clean.values), group=1)
    moved.keys[order], moved.values[order] = clean.keys, clean.values
    batch = batch_of(PARTS)
    both = StepInputs(
        batch.input_ids,
        batch.positions,
        batch.slot_mapping * 2,
        (torch.full_like(batch.block_tables[0], 31), order[batch.block_tables[0]]),
        batch.logits_indices,
        batch.num_decodes,
        batch.lens,
    )
    assert torch.equal(attended(backend, both, moved, Seen(0.3, 5)), attended(backend, batch, clean, Seen(0.3, 5)))
