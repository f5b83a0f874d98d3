"""The record of adapters' products. Sizes of Llama-3.1-8B: a decode of 64 streams with 64 adapters, and prompts of a few."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshlm.kernels.lora import reference
from meshlm.kernels.lora.kernel import add_adapters, in_order
from meshlm.kernels.lora.layout import LayerPlaces, Memory, Pair, pack, wide_of
from meshlm.kernels.op import Launch, Op

BEFORE, BEHIND = 2, 1  # matrices of other layers


def random_adapters(
    ranks: Sequence[Sequence[int]], inputs: int, outputs: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[dict[int, Pair]]:
    """Of each slot, for each slice of the outputs, a pair of that rank; 0: none."""
    return [
        {
            which: Pair(
                torch.randn(rank, inputs, device=device).to(dtype) * inputs**-0.5,
                torch.randn(size, rank, device=device).to(dtype) * rank**-0.5,
            )
            for which, (rank, size) in enumerate(zip(of_slot, outputs, strict=True))
            if rank
        }
        for of_slot in ranks
    ]


def memory_of(adapters: Sequence[dict[int, Pair]], slices: int, max_rank: int, like: Tensor) -> Memory:
    """All slots, those of a layer whose matrices stand between those of others."""
    matrices = BEFORE + slices + BEHIND
    packed = [pack({BEFORE + which: pair for which, pair in pairs.items()}, matrices, like.dtype) for pairs in adapters]
    size = max(len(one.values) for one in packed)
    values = torch.full((len(packed), max(16, size)), torch.nan, dtype=like.dtype)  # what no adapter has is not read
    places = torch.stack([one.places for one in packed])
    for slot, one in enumerate(packed):
        values[slot, : len(one.values)] = one.values
        places[slot, :, :2] += slot * values.shape[1]
    return Memory(values.flatten().to(like.device), places.to(like.device), wide_of(max_rank))


def _make(
    dtype: torch.dtype, device: torch.device, tokens: int, inputs: int, outputs: tuple[int, ...],
    ranks: tuple[tuple[int, ...], ...], max_rank: int, in_turn: bool = True, share: float = 1.0,
) -> Launch:  # fmt: skip
    """ranks: of each slot and slice. in_turn: tokens that follow one another have different adapters; else they are sorted. share: of
    the tokens, those that have one."""
    ends = [sum(outputs[: nth + 1]) for nth in range(len(outputs))]
    slices = [(end - size, end) for end, size in zip(ends, outputs, strict=True)]
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    before = torch.randn(tokens, ends[-1], device=device).to(dtype)
    slots = torch.arange(tokens, dtype=torch.int32, device=device) % len(ranks)
    slots = slots if in_turn else slots.sort().values.to(torch.int32)
    slots = torch.where(torch.rand(tokens, device=device) <= share, slots, -1).to(torch.int32)
    adapters = random_adapters(ranks, inputs, outputs, dtype, device)
    memory, layer = memory_of(adapters, len(outputs), max_rank, x), LayerPlaces(BEFORE, slices, device)

    def run() -> Tensor:
        return add_adapters(x, before.clone(), layer, memory, in_order(slots, len(ranks)))

    def expected() -> Tensor:
        return reference.add_adapters(x, before, slots, adapters, slices)

    held = [sum(rank * (inputs + size) for rank, size in zip(one, outputs, strict=True)) for one in ranks]
    used = sum(held[slot] for slot in set(slots.tolist()) if slot >= 0)
    each = [held[slot] for slot in slots.tolist() if slot >= 0]
    return Launch(run, expected, x.nbytes + 2 * before.nbytes + used * x.itemsize, 2.0 * sum(each))


QKV, UP, OUT = (4096, 1024, 1024), (14336, 14336), (4096,)
LLAMA = [(inputs, outputs) for inputs, outputs in ((4096, QKV), (4096, OUT), (4096, UP), (14336, OUT))]
SMALL = (
    (1, 64, (48,), ((8,),), 8),
    (5, 72, (40, 24, 24), ((8, 8, 8), (0, 3, 0), (16, 0, 5)), 16),
    (37, 136, (130, 130), ((16, 16), (1, 0)), 16, True, 0.6),
    (40, 130, (257,), ((64,), (33,), (7,)), 64, False),
    (19, 64, (96, 33), ((256, 100), (0, 0), (20, 256)), 256, True, 0.5),
    (530, 64, (40, 8), ((8, 8), (12, 0)), 16, False, 0.9),
    (3, 64, (40,), ((8,), (8,)), 16, True, 0.0),
)
OF_MODELS = [
    (tokens, inputs, outputs, ((16,) * len(outputs),) * slots, 16, tokens <= 64)
    for inputs, outputs in LLAMA
    for tokens, slots in ((1, 1), (64, 1), (64, 64), (256, 64), (2048, 4), (8192, 1))
]
OPS = (Op("add_adapters", _make, SMALL, OF_MODELS, near=4),)
