"""The compiled library with its argument types declared: what kernel.py and packed.py call."""

import ctypes
from functools import cache

from meshlm.kernels.cpu.build import load

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES = {
    "meshlm_panel_bytes": [_LONG] * 2,
    "meshlm_form": [_LONG] * 2,
    "meshlm_rounded_bytes": [_LONG],
    "meshlm_can_round": [],
    "meshlm_narrowest": [_POINTER, _LONG],
    "meshlm_pack": [_POINTER] * 2 + [_LONG] * 2,
    "meshlm_repack": [_POINTER, _LONG, _LONG] + [_POINTER] * 2 + [_LONG] * 3,
    "meshlm_rows": [_POINTER] * 3 + [_LONG] * 2,
    "meshlm_linear": [_POINTER] * 4 + [_LONG] * 3,
    "meshlm_rms_norm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT],
    "meshlm_silu_mul": [_POINTER] * 2 + [_LONG] * 2,
    "meshlm_gelu_mul": [_POINTER] * 2 + [_LONG] * 3,
    "meshlm_rope_cache": [_POINTER] * 6 + [_FLOAT] + [_POINTER] * 3 + [_LONG] * 5,
    "meshlm_norm_linear": [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 5 + [_LONG] * 3,
    "meshlm_span_rows": [_LONG] * 2,
    "meshlm_layers": [_POINTER],
    "meshlm_encoder": [_POINTER],
    "meshlm_attention": [_POINTER] * 7 + [_LONG] * 6 + [_FLOAT, _FLOAT, _LONG, _LONG, _POINTER, _POINTER],
}
_RESULTS = {
    "meshlm_panel_bytes": _LONG,
    "meshlm_form": _LONG,
    "meshlm_rounded_bytes": _LONG,
    "meshlm_narrowest": _LONG,
    "meshlm_can_round": ctypes.c_int,
    "meshlm_linear": ctypes.c_int,
    "meshlm_norm_linear": ctypes.c_int,
    "meshlm_span_rows": _LONG,
    "meshlm_layers": ctypes.c_int,
    "meshlm_encoder": ctypes.c_int,
    "meshlm_attention": ctypes.c_int,
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it cannot be built or loaded."""
    found = load()
    if found is not None:
        for name, types in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes = types
            function.restype = _RESULTS.get(name)
    return found


@cache
def call() -> ctypes.CDLL:
    """The library, where it must be there."""
    found = library()
    if found is None:
        raise RuntimeError("the CPU kernels are not available here")
    return found
