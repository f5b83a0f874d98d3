"""The self-test of a start with --enable-lora: with the sizes of the model's layers, and with few tokens and many, adapters add what
they must, to the tokens of their rows alone."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from meshlm.kernels.lora import reference
from meshlm.kernels.lora.kernel import FEW_TOKENS, add_adapters, in_order, token_slots
from meshlm.kernels.lora.layout import LayerPlaces
from meshlm.kernels.lora.op import BEFORE, memory_of, random_adapters
from meshlm.kernels.self_test import Result, distance

NEAR = {torch.float32: 5e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
ROWS = 40  # of the table of rows; some have no adapter, and some no tokens


class LayerShape(NamedTuple):
    """The sizes of a layer that adapters may change."""

    inputs: int
    slices: tuple[tuple[int, int], ...]  # of its outputs: begin and end of each matrix


def results(shapes: Sequence[LayerShape], max_rank: int, like: torch.Tensor) -> Iterator[Result]:
    """like: of the model's dtype and device."""
    dtype, device = like.dtype, like.device
    for shape in shapes:
        outputs = [end - begin for begin, end in shape.slices]
        ranks = [[max_rank] * len(outputs), [(max_rank + 1) // 2] + [0] * (len(outputs) - 1), [1] * len(outputs)]
        adapters = random_adapters(ranks, shape.inputs, outputs, dtype, device)
        memory = memory_of(adapters, len(outputs), max_rank, like)
        layer = LayerPlaces(BEFORE, shape.slices, device)
        for tokens in (7, FEW_TOKENS + 9):
            row_of, counts = torch.randperm(ROWS)[:7], torch.full((7,), tokens // 7)
            counts[-1] = 0
            rows, ends = (one.to(torch.int32).to(device) for one in (row_of, counts.cumsum(0)))
            column = torch.randint(0, len(ranks) + 1, (ROWS,), dtype=torch.int32).to(device)
            slots = token_slots(rows, ends, len(rows), column, tokens)
            known = reference.token_slots(rows, ends, len(rows), column, tokens)
            wrong = float((slots != known).sum())
            yield Result("the adapters of", wrong, 0.0, "tokens are those of other rows")
            x = torch.randn(tokens, shape.inputs, device=device).to(dtype)
            out = torch.randn(tokens, shape.slices[-1][1], device=device).to(dtype)
            expected = reference.add_adapters(x, out, known, adapters, shape.slices)
            found = add_adapters(x, out.clone(), layer, memory, in_order(known, len(ranks)))
            what = f"products of adapters with {shape.inputs} inputs and {tokens} tokens are"
            yield Result(what, distance(found, expected), NEAR[dtype])
            without = known < 0
            changed = float((found[without] != out[without]).sum())
            yield Result("adapters change", changed, 0.0, "numbers of tokens without one")
