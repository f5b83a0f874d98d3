"""The self-test of integer products at a start, on this very processor: do they give what those of float32 give?

Inputs that are whole numbers, of which the largest of each 32 is 32512, are their own codes (rounded.h). So both products are of the
same numbers, and differ by float32's additions alone. For the former processors have instructions of their own.
"""

from collections.abc import Iterator
from functools import cache

import structlog
import torch
from torch import Tensor

from meshlm.kernels.cpu import kernel, packed
from meshlm.kernels.self_test import Result, why_wrong

NEAR = 1e-5  # of the largest result: sums of 256 products in float32
LARGEST = 32512  # code of an input
OUTPUTS, INPUTS = 21, 256
_log = structlog.get_logger()


def _blocks(size: int, scale_at: int, each: int) -> Tensor:
    """Rows of blocks of `size` bytes for `each` inputs, at random but for a half 1 / 64 that is their scale: uint8 [OUTPUTS, bytes]."""
    blocks = torch.randint(0, 256, (OUTPUTS, INPUTS // each, size), dtype=torch.uint8)
    blocks[..., scale_at : scale_at + 2] = torch.tensor([1 / 64], dtype=torch.float16).view(torch.uint8)
    return blocks.flatten(1)


# By GGML's number of the type: Q4_0, Q5_0, Q8_0 and Q6_K, of which every form of codes and scales is one or has all parts.
KINDS = {2: (18, 0, 32), 6: (22, 0, 32), 8: (34, 0, 32), 14: (210, 208, 256)}


@cache
def rounds() -> bool:
    """Whether products with rounded activations are faster on this processor, and right."""
    if not packed.can_round():
        return False
    why = why_wrong(_results())
    if why:
        _log.warning("integer products are not right on this processor: activations stay float32", reason=why)
    return not why


def _results() -> Iterator[Result]:
    x = torch.randint(-LARGEST + 1, LARGEST, (11, INPUTS)).float()
    x[:, ::32] = LARGEST
    for kind, sizes in KINDS.items():
        rows = _blocks(*sizes)
        found, exact = (_product(kind, rows, x, rounded=rounded) for rounded in (True, False))
        error = (found - exact).abs().max() / exact.abs().max()
        yield Result(f"a result of type {kind} is", error, NEAR, "of the largest off")


def _product(kind: int, rows: Tensor, x: Tensor, *, rounded: bool) -> Tensor:
    form = packed.form_of(kind, rounded=rounded)
    assert form is not None
    forms = [form] * -(-OUTPUTS // packed.WIDTH)
    weight = torch.empty(packed.packed_bytes(forms, INPUTS), dtype=torch.uint8)
    packed.write_table(weight, forms, INPUTS, rounded=rounded)
    packed.repack(packed.Rows(rows, kind), None, weight, 0, INPUTS)
    return kernel.linear(x, weight, None, OUTPUTS)
