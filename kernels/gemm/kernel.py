"""Products of many rows with a weight:  out = x w^T, or out += x w^T.

By cuBLAS. Its heuristic's first choice is not always its fastest algorithm, by 1 to 20% (docs/performance.md): where a tuner has found
another one for these sizes on this GPU, that one; else torch's own call.
"""

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.gemm.cublaslt import ALIGNED, TYPES, Algorithm, Products, library

ADDED_ROWS = 512  # from so many on a product adds to the stream itself, and the norm behind it reads that alone


class Entry(NamedTuple):
    """Rows above `over` up to `to`."""

    over: int
    to: int
    config: tuple[int, ...]


Table = dict[tuple[int, ...], list[Entry]]  # by outputs and inputs
_refused: set[tuple[int, int, Entry]] = set()
_log = logging.getLogger("meshlm.kernels")


@tables.remembered
def _table() -> Table:
    """Nothing without a table of this processor: another one's choices mean little."""
    if not torch.cuda.is_available() or library() is None:
        return {}
    return entries(tables.products("gemm"))


def entries(products: dict[tuple[int, ...], list[list[Any]]]) -> Table:
    """Entries by what `tables.products` gives."""
    return {key: [Entry(over, to, tuple(config)) for over, to, config in rows] for key, rows in products.items()}


def entry_for(known: list[Entry], rows: int) -> Entry | None:
    return next((entry for entry in known if entry.over < rows <= entry.to), None)


@cache
def _products(device: torch.device, dtype: torch.dtype) -> Products:
    return Products(device, dtype)


def products_of(device: torch.device, dtype: torch.dtype) -> Products:
    """The library's products that `gemm` runs too."""
    return _products(device, dtype)


@cache
def _algorithm(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, entry: Entry) -> Algorithm | None:
    """The algorithm; None in a version of the library that does not offer it."""
    known = _products(device, dtype).algorithms(entry.to, outputs, inputs)
    return next((algorithm for algorithm in known if algorithm.config == entry.config), None)


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k], w [n, k] -> [m, n]."""
    found = _by_table(x, w, None) if bias is None else None
    return F.linear(x, w, bias) if found is None else found


def add_gemm(x: Tensor, w: Tensor, to: Tensor) -> Tensor:
    """to [m, n] += x w^T, in place, rounded once; x [m, k], w [n, k], all dense."""
    return to.addmm_(x, w.t()) if _by_table(x, w, to) is None else to


def _by_table(x: Tensor, w: Tensor, to: Tensor | None) -> Tensor | None:
    """The product by the table's choice; None where torch's own call does it."""
    outputs, inputs = w.shape
    tables.note_use("gemm", (outputs, inputs))
    known = _table().get((outputs, inputs)) if x.dtype in TYPES else None
    entry = entry_for(known, x.shape[0]) if known else None
    unaligned = any(each.data_ptr() % ALIGNED for each in (x, w, to) if each is not None)
    if entry is None or unaligned or not x.is_contiguous():
        return None
    this = (outputs, inputs, entry)
    if this in _refused:
        return None
    try:
        algorithm = _algorithm(x.device, x.dtype, *this)
        if algorithm is None:
            return None
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device) if to is None else to
        _products(x.device, x.dtype).run(x, w, out, algorithm, add=to is not None)
    except torch.OutOfMemoryError:  # a RuntimeError too, and not the library's
        raise
    except RuntimeError as error:  # another version of it; or fewer rows than entry.to are another case for it
        _refused.add(this)
        _log.warning(
            "product of %d rows with [%d, %d]: %s; torch's own from now on", x.shape[0], outputs, inputs, error
        )
        return None
    return out
