"""Packed weights as torch tensors: uint8, self-describing, on the CPU. The layout: packed.h.

Their numbers are float32, or bfloat16 or float16 where that is the same, or codes of 4 to 8 bits with scales as a GGUF file has
them (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K). All are computed with in float32, with the very values that decoding the file
would have given; or, where a weight says `rounded`, activations are rounded to 16 bits and the codes multiplied as integers
(rounded.h), by processors that `can_round`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.cpu.library import call, library

WIDTH = 16  # outputs of a panel
_FLOATS = 0
_ROUNDED = 256  # is added to a form
_ALIGN = 64  # bytes


class Rows(NamedTuple):
    """Encoded rows of a tensor of a GGUF file: uint8 [rows, bytes of a row], and ggml's number of their type."""

    data: Tensor
    ggml_type: int


def form_of(ggml_type: int, *, rounded: bool = False) -> int | None:
    """The form in which packed weights keep a tensor of this type, codes and scales as they are; None if there is none.

    rounded: of weights that say so."""
    found = library()
    form = -1 if found is None else int(found.meshlm_form(ggml_type, rounded))
    return None if form < 0 else form


def can_round() -> bool:
    """Whether this processor computes faster with rounded activations."""
    found = library()
    return found is not None and bool(found.meshlm_can_round())


def rounded_bytes(k: int) -> int:
    """Size of k rounded inputs."""
    return int(call().meshlm_rounded_bytes(k))


def packed_bytes(forms: list[int], k: int) -> int:
    """Size of a packed weight of k inputs whose panels have these forms."""
    return _table_bytes(len(forms)) + sum(_panel_bytes(forms, k))


def _table_bytes(panels: int) -> int:
    return -(-panels * 16 // _ALIGN) * _ALIGN


def _panel_bytes(forms: list[int], k: int) -> list[int]:
    size = {form: int(call().meshlm_panel_bytes(form, k)) for form in set(forms)}
    return [size[form] for form in forms]


def write_table(packed: Tensor, forms: list[int], k: int, *, rounded: bool = False) -> None:
    """Begin a packed weight: uint8 [packed_bytes(forms, k)].

    rounded: products with it round their activations; all forms are of `form_of(rounded=True)`."""
    assert not (rounded and _FLOATS in forms)
    table = torch.empty(len(forms), 2, dtype=torch.long)
    sizes = torch.tensor([_table_bytes(len(forms)), *_panel_bytes(forms, k)[:-1]], dtype=torch.long)
    torch.cumsum(sizes, 0, out=table[:, 0])
    table[:, 1] = torch.tensor(forms, dtype=torch.long) + rounded * _ROUNDED
    packed[: _table_bytes(len(forms))] = 0
    packed[: len(forms) * 16] = table.flatten().view(torch.uint8)


def pack(weight: Tensor) -> Tensor:
    """float32 [n, k] -> packed, as float32; as bfloat16 or float16 where all numbers are such. [experts, n, k] -> [experts, bytes], as
    float32 always: experts of several ranks have one form."""
    *experts, n, k = weight.shape
    weight = weight.contiguous()
    form = _FLOATS if experts else int(call().meshlm_narrowest(weight, n * k))
    forms = [form] * -(-n // WIDTH)
    packed = torch.empty(*experts, packed_bytes(forms, k), dtype=torch.uint8)
    for matrix, into in zip(weight.view(-1, n, k), packed.view(-1, packed.shape[-1]), strict=True):
        write_table(into, forms, k)
        call().meshlm_pack(matrix, into, n, k)
    return packed


def repack(rows: Rows, order: Tensor | None, packed: Tensor, first: int, k: int) -> None:
    """Encoded rows of k inputs become outputs `first` and on, a multiple of 16, of a weight whose table says so already.

    order int64: which row of `rows` each output is, if not its own. What the last panel has beyond them becomes zeros."""
    data = rows.data
    if data.stride(1) != 1:
        raise ValueError("the bytes of a row must lie side by side")
    count = data.shape[0] if order is None else len(order)
    call().meshlm_repack(data, data.stride(0), rows.ggml_type, order, packed, first, count, k)


def rows(packed: Tensor, ids: Tensor, k: int) -> Tensor:
    """Rows of a packed weight of k inputs: int64 [t] -> [t, k]."""
    ids, out = ids.contiguous(), torch.empty(len(ids), k)
    call().meshlm_rows(packed.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), k)
    return out
