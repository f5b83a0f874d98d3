"""Runs kernels in Triton's Gluon dialect on torch, where there is no GPU: Triton's interpreter knows nothing of it.

A kernel's module is imported anew with stand-ins for Gluon. What a tensor holds is computed; how it lies in threads is left out, and is
for the compiler to refuse (test_compiles.py). Loads and stores beyond a tensor are errors. The parts of the dialect that our kernels of
products use are here, no more.
"""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_OPERATORS = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "and",
    "or",
    "lshift",
    "rshift",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
)


class Value:
    """A tensor of a program."""

    def __init__(self, held: Tensor) -> None:
        self.held, self.shape, self.dtype = held, tuple(held.shape), held.dtype
        self.type = self
        self.layout = None

    def to(self, dtype: torch.dtype, *, bitcast: bool = False) -> "Value":
        return Value(self.held.view(dtype) if bitcast else self.held.to(dtype))

    def broadcast_to(self, shape: list[int]) -> "Value":
        return Value(self.held.broadcast_to(shape))

    def __getitem__(self, at: Any) -> "Value":
        return Value(self.held[at])


def _operate(name: str, swapped: bool) -> Callable[[Value, Any], Any]:
    def work(mine: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        theirs = _held(other)
        return Value(
            getattr(torch.as_tensor(theirs), f"__{name}__")(mine.held)
            if swapped
            else getattr(mine.held, f"__{name}__")(theirs)
        )

    return work


for _name in _OPERATORS:
    setattr(Value, f"__{_name}__", _operate(_name, swapped=False))
    setattr(Value, f"__r{_name}__", _operate(_name, swapped=True))


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = ModuleType("pointer")
        self.dtype.element_ty = memory.dtype  # type: ignore[attr-defined]

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.at + _held(other))

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Flat places, and which of them count. AssertionError for one outside the memory."""
        at, real = torch.broadcast_tensors(
            torch.as_tensor(self.at), torch.as_tensor(True if mask is None else _held(mask))
        )
        assert bool(((at >= 0) & (at < self.memory.numel()))[real].all()), "outside the tensor"
        return torch.where(real, at, 0).long(), real


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Value) else value


class Kernel:
    """A function that other functions of the dialect call, and that is launched."""

    program = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function(*given, **named)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            named = {name: value for name, value in named.items() if name not in ("num_warps", "launch_pdl")}
            pointers = [Pointer(one) if isinstance(one, Tensor) else one for one in given]
            for Kernel.program in range(math.prod(grid)):
                self._function(*pointers, **named)

        return launch


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Value:
    at, real = pointer.places(mask)
    return Value(torch.where(real, pointer.memory.view(-1)[at], torch.tensor(other, dtype=pointer.memory.dtype)))


def _store(pointer: Pointer, value: Value, mask: Any = None) -> None:
    at, real = pointer.places(mask)
    pointer.memory.view(-1)[at[real]] = value.held.broadcast_to(at.shape)[real]


def _asm(text: str, constraints: str, given: list[Any], **_: Any) -> Value:
    if text.startswith("prefetch"):
        return Value(torch.zeros((), dtype=torch.int32))
    found = re.fullmatch(r"lop3\.b32 \$0, \$1, (0x\w+), (0x\w+), 0xEA;", text)
    assert found, f"no stand-in for {text!r}"
    return Value(given[0].held & int(found[1], 16) | int(found[2], 16))


def _language() -> ModuleType:
    gl: Any = ModuleType("triton.experimental.gluon.language")
    for name in ("int16", "int32", "int64", "float16", "bfloat16", "float32"):
        setattr(gl, name, getattr(torch, name))
    for name in ("SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "DistributedLinearLayout"):
        setattr(gl, name, lambda *_: None)
    gl.constexpr = lambda value: value
    gl.static_range = range
    gl.program_id = lambda axis: Kernel.program
    gl.arange = lambda first, end, layout: Value(torch.arange(first, end, dtype=torch.int32))
    gl.full = lambda shape, value, dtype, layout=None: Value(torch.full(shape, value, dtype=dtype))
    gl.zeros = lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype))
    gl.minimum = lambda one, other: Value(torch.minimum(torch.as_tensor(_held(one)), torch.as_tensor(_held(other))))
    gl.expand_dims = lambda value, dim: Value(value.held.unsqueeze(dim))
    gl.permute = lambda value, dims: Value(value.held.permute(dims))
    gl.reshape = lambda value, shape: Value(value.held.reshape(shape))
    gl.join = lambda one, other: Value(torch.stack([one.held, other.held], -1))
    gl.convert_layout = lambda value, layout, assert_trivial=False: value
    gl.sum = lambda value, axis: Value(value.held.sum(axis))
    gl.load, gl.store, gl.inline_asm_elementwise = _load, _store, _asm
    return gl  # type: ignore[no-any-return]


def _jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


@contextmanager
def _stand_ins() -> Iterator[None]:
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = _jit, lambda function: function, _language()
    ampere: Any = ModuleType("triton.experimental.gluon.language.nvidia.ampere")
    ampere.mma_v2 = lambda a, b, acc: Value(acc.held + a.held.float() @ b.held.float())
    cuda: Any = ModuleType("triton.language.extra.cuda")
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None
    experimental: Any = ModuleType("triton.experimental")
    experimental.gluon = gluon
    new = {each.__name__: each for each in (experimental, gluon, gluon.language, ampere, cuda)}
    before = {name: sys.modules.get(name) for name in new}
    sys.modules.update(new)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def on_torch(module: ModuleType) -> Any:
    """The module, with kernels that run on torch."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_on_torch", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with _stand_ins():
        spec.loader.exec_module(found)
    return found
