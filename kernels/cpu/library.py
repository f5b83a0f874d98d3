"""The compiled library with its argument types declared: what kernel.py, packed.py and whole layers call."""

import ctypes
from collections.abc import Mapping
from functools import cache

from torch import Tensor

from meshlm.kernels.cpu.build import load


class Memory:
    """The type of an argument that points at a tensor's numbers; None: nowhere."""

    @staticmethod
    def from_param(tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


_TYPES = {
    "m": Memory,
    "p": ctypes.c_void_p,
    "l": ctypes.c_long,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
    "s": ctypes.c_void_p,
    "": None,
}
_SIGNATURES = """
    panel_bytes=ll:l form=ll:l rounded_bytes=l:l can_round=:i narrowest=ml:l pack=mmll: repack=mllmmlll: rows=pppll:
    linear=pppplll:i rms_norm=ppppllf: silu_mul=ppll: gelu_mul=pplll: rope_cache=ppppppfppplllll:
    norm_linear=pppfppppplll:i span_rows=ll:l layers=s:i encoder=s:i attention=pppppppllllllffllmm:i
"""
"""By function, without meshlm_ before its name: its arguments and its result (_TYPES); p: an address, which costs less than m; s: a
structure of `step_type`."""


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it cannot be built or loaded."""
    found = load()
    if found is not None:
        for name, _, types in (one.partition("=") for one in _SIGNATURES.split()):
            function, (arguments, _, result) = getattr(found, f"meshlm_{name}"), types.partition(":")
            function.argtypes, function.restype = [_TYPES[one] for one in arguments], _TYPES[result]
    return found


@cache
def call() -> ctypes.CDLL:
    """The library, where it must be there."""
    found = library()
    if found is None:
        raise RuntimeError("the CPU kernels are not available here")
    return found


def step_type(tensors: str, counts: str) -> type[ctypes.Structure]:
    """The structure that computes whole layers: the memory of these tensors, then these counts, then scale and eps."""
    fields = [(name, ctypes.c_void_p) for name in tensors.split()], [(name, ctypes.c_int64) for name in counts.split()]
    numbers = [(name, ctypes.c_double) for name in ("scale", "eps")]
    return type("Step", (ctypes.Structure,), {"_fields_": [*fields[0], *fields[1], *numbers]})


def compute(
    name: str, step: type[ctypes.Structure], tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> None:
    """Whole layers, by the function of this name. MemoryError."""
    filled = step(**{name: tensor.data_ptr() for name, tensor in tensors.items()}, **numbers)
    if getattr(call(), name)(ctypes.byref(filled)):
        raise MemoryError("no memory for attention")
