"""Runs kernels in Triton's Gluon dialect on torch, where there is no GPU: Triton's interpreter knows nothing of it.

A kernel's module is imported anew with stand-ins for Gluon. What a tensor holds is computed; how it lies in threads is left out, and is
for the compiler to refuse (test_compiles.py). Loads and stores beyond a tensor are errors. The parts of the dialect that our kernels of
products use are here, no more.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HELPERS = (
    "meshlm.kernels.packed_few.layouts",
    "meshlm.kernels.packed_experts.operands",
)  # whose functions kernels call
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
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

    def __bool__(self) -> bool:
        return bool(self.held)

    def __neg__(self) -> "Value":
        return Value(-self.held)

    def __index__(self) -> int:
        return int(self.held)

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


def _both(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    """Two operands, of which a number is of the other's type."""
    one, other = _held(one), _held(other)
    like = one if isinstance(one, Tensor) else other
    dtype = like.dtype if isinstance(like, Tensor) else torch.int32
    return torch.as_tensor(one, dtype=None if isinstance(one, Tensor) else dtype), torch.as_tensor(
        other, dtype=None if isinstance(other, Tensor) else dtype
    )


class Kernel:
    """A function that other functions of the dialect call, and that is launched."""

    program: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function(*given, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            named = {name: value for name, value in named.items() if name not in ("num_warps", "launch_pdl")}
            pointers = [Pointer(one) if isinstance(one, Tensor) else one for one in given]
            Kernel.grid = grid
            for Kernel.program in product(*(range(size) for size in grid)):
                self._function(*pointers, **named)

        return launch


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Value:
    at, real = pointer.places(mask)
    return Value(torch.where(real, pointer.memory.view(-1)[at], torch.tensor(other, dtype=pointer.memory.dtype)))


def _store(pointer: Pointer, value: Value, mask: Any = None) -> None:
    at, real = pointer.places(mask)
    pointer.memory.view(-1)[at[real]] = value.held.broadcast_to(at.shape)[real]


_WORD = 0xFFFFFFFF


def _times(one: Tensor, other: Tensor, third: Tensor) -> Tensor:
    """Two products of bfloat16, and sums."""
    found = torch.zeros_like(one)
    for at in (0, 16):
        a, b, c = ((each >> at & 0xFFFF).to(torch.int16).view(torch.bfloat16).double() for each in (one, other, third))
        found |= (a * b + c).to(torch.bfloat16).view(torch.int16).long().bitwise_and(0xFFFF) << at
    return found


_INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & _WORD,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, _: a & b | c,  # with 0xEA
    "fma.rn.bf16x2": _times,
}


def _names(halves: str) -> list[str]:
    return [each.strip() for each in halves.strip("{}").split(",")]


def _asm(text: str, constraints: str, given: list[Any], **_: Any) -> Value:
    """Runs PTX with one result, on words."""
    if text.startswith(("prefetch", "griddepcontrol")):
        return Value(torch.zeros((), dtype=torch.int32))
    words = torch.broadcast_tensors(*(one.held.long() & _WORD for one in given))
    held = {f"${nth + 1}": word for nth, word in enumerate(words)}
    for line in re.sub(r"^{|}$", "", text.strip()).split(";"):
        if (parts := line.split(None, 1)) and parts[0] != ".reg":
            to, *operands = (each.strip() for each in re.findall(r"\s*{.*?}|[^,]+", parts[1]))
            if to.startswith("{"):  # a word becomes its halves
                for half, shift in zip(_names(to), (0, 16), strict=True):
                    held[half] = held[operands[0]] >> shift & 0xFFFF
            elif operands[0].startswith("{"):  # halves become a word
                low, high = (held[half] for half in _names(operands[0]))
                held[to] = low | high << 16
            else:
                assert parts[0] != "lop3.b32" or operands[-1] == "0xEA"
                values = (held[each] if each in held else torch.full_like(words[0], int(each, 0)) for each in operands)
                held[to] = _INSTRUCTIONS[parts[0]](*values)
    found = held["$0"]
    return Value(torch.where(found > _WORD >> 1, found - (1 << 32), found).to(torch.int32))


def _language() -> ModuleType:
    gl: Any = ModuleType("triton.experimental.gluon.language")
    for name in ("int16", "int32", "int64", "float16", "bfloat16", "float32"):
        setattr(gl, name, getattr(torch, name))
    for name in ("SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "DistributedLinearLayout"):
        setattr(gl, name, lambda *_: None)
    gl.BlockedLayout = lambda *_: None
    gl.constexpr = lambda value: value
    gl.static_range = range
    gl.program_id = lambda axis: Value(torch.tensor(Kernel.program[axis], dtype=torch.int32))
    gl.arange = lambda first, end, layout: Value(torch.arange(first, end, dtype=torch.int32))
    gl.full = lambda shape, value, dtype, layout=None: Value(torch.full(shape, value, dtype=dtype))
    gl.zeros = lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype))
    gl.num_programs = lambda axis: Kernel.grid[axis]
    gl.minimum = lambda one, other: Value(torch.minimum(*_both(one, other)))
    gl.maximum = lambda one, other: Value(torch.maximum(*_both(one, other)))
    gl.where = lambda mask, one, other: Value(torch.where(mask.held, *_both(one, other)))
    gl.exp = lambda value: Value(value.held.exp())
    gl.min = lambda value, axis: Value(value.held.amin(axis))
    gl.split = lambda value: tuple(Value(part) for part in value.held.unbind(-1))
    gl.expand_dims = lambda value, dim: Value(value.held.unsqueeze(dim))
    gl.permute = lambda value, dims: Value(value.held.permute(dims))
    gl.reshape = lambda value, shape: Value(value.held.reshape(shape))
    gl.join = lambda one, other: Value(torch.stack([one.held, other.held], -1))
    gl.convert_layout = lambda value, layout, assert_trivial=False: value
    gl.sum = lambda value, axis: Value(value.held.sum(axis))
    gl.load, gl.store, gl.inline_asm_elementwise = _load, _store, _asm
    return gl  # type: ignore[no-any-return]


def _range(*given: Any) -> Iterator[Any]:
    """A kernel's loop counts in tensors where one of its ends is one."""
    is_value = any(isinstance(one, Value) for one in given)
    for nth in range(*(one.__index__() if isinstance(one, Value) else one for one in given)):
        yield Value(torch.tensor(nth, dtype=torch.int32)) if is_value else nth


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
    before = {name: sys.modules.pop(name, None) for name in HELPERS}
    found.range = _range  # type: ignore[attr-defined]
    with _stand_ins():
        spec.loader.exec_module(found)
    for name, helper in before.items():
        sys.modules.pop(name, None)
        if helper is not None:
            sys.modules[name] = helper
    return found
