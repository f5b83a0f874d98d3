"""The record of a kernel: what it is run with, what it must give and how near, and what it moves and computes.

`kernels/<op>/op.py` has OPS: a record for each function of the operation. From it follow the bench (bench.py), the test beside the
reference (tests/kernels/test_ops.py), what is compiled where there is no GPU (test_compiles.py) and, with candidates, the tables of
tiles (tuning/measure_tables.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Outputs = Tensor | Sequence[Tensor | None]
Case = tuple[Any, ...]
Tile = tuple[Any, ...]
DTYPES = torch.float32, torch.float16, torch.bfloat16


class Launch(NamedTuple):
    """One case on a device, with inputs at random."""

    run: Callable[[], Outputs]
    """By the kernel."""
    expected: Callable[[], Outputs]
    """By plain torch, asked before `run`; leaves the inputs as they are."""
    num_bytes: float = 0.0
    num_flop: float = 0.0
    beside: Mapping[str, Callable[[], object]] = {}
    """Other ways to the same, for the bench."""
    copies: int = 1
    """Times that one run does it, each with a weight or a cache of its own, so that these come from memory."""


class Op(NamedTuple):
    """One function. `make` is called with a dtype, a device and the sizes of a case; where there are candidates with tile=, too."""

    name: str
    make: Callable[..., Launch]
    cases: Sequence[Case]
    """Odd sizes, small enough for Triton's interpreter."""
    of_models: Sequence[Case] = ()
    """Sizes of models, which the bench times in bfloat16."""
    near: float = 1.0
    """How far a number may be off, in roundings of the dtype (tests/kernels/support/device.py)."""
    exact: int = 0
    """So many of the outputs, the first ones, must be the same to the last bit."""
    dtypes: Sequence[torch.dtype] = DTYPES
    candidates: Callable[[Case], Sequence[Tile]] = lambda case: ()
    """Tiles that a case may have."""
    needs: int = 0
    """The compute capability of the only GPUs that it is for; 0: of any."""
    peers: bool = False
    """Whether it needs the other ranks of a group, and has no cases for one process."""
    tuned: Sequence[Case] = ()
    """Cases by whose times a table of tiles is made."""


def names() -> list[str]:
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/op.py"))


def records(name: str) -> tuple[Op, ...]:
    found: tuple[Op, ...] = import_module(f"meshlm.kernels.{name}.op").OPS
    return found


def all_records() -> Iterator[tuple[str, Op]]:
    """All records, each beside the name of its operation."""
    return ((name, op) for name in names() for op in records(name))
