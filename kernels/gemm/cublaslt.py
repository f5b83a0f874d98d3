"""cuBLASLt, called directly: it knows several algorithms for a product, of which torch always takes the first.

    out [m, n] = x [m, k] w [n, k]^T [+ out]        accumulated in float32

The library is the one that torch has loaded. Structures are opaque to us; the numbers are those of cublasLt.h. Not thread-safe: the
thread that launches is the only one here, and products run one after the other, since they share one workspace. Many algorithms count
their tiles there where they may: then the library clears a counter first, which keeps the product from beginning while the kernel
before it ends. So it is asked twice, with a workspace and without.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
FLOAT32, COMPUTE_32F = 0, 68
TRANSPOSE_A = 3  # of CUBLASLT_MATMUL_DESC
COLUMNS = 3  # of CUBLASLT_MATRIX_LAYOUT
MAX_WORKSPACE = 1  # of CUBLASLT_MATMUL_PREF
# Of CUBLASLT_ALGO_CONFIG: id, tile, split k, reduction, swizzle, custom option, stages, inner shape, cluster shape; bytes of each.
CONFIG = [(attribute, 4) for attribute in range(7)] + [(7, 2), (8, 2)]
WORKSPACE_BYTES = 8 << 20
MOST = 16  # algorithms that are asked for, each time
ALIGNED = 256  # bytes, which the heuristic takes for granted


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Algorithm(NamedTuple):
    """config: what tells it from the others, in any version of the library; the last number is 1 if it needs a workspace."""

    config: tuple[int, ...]
    found: Any


@cache
def library() -> Any:
    """The cuBLASLt library; None where there is none. Its calls are too short to let go of the interpreter for."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.PyDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


class Products:
    """Products on one GPU, with one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._lt = library()
        self._type = TYPES[dtype]
        self._handle, self._operation, self._preference = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._do("Create", ctypes.byref(self._handle))
        self._do("MatmulDescCreate", ctypes.byref(self._operation), COMPUTE_32F, FLOAT32)
        transposed = ctypes.c_int(1)
        self._do("MatmulDescSetAttribute", self._operation, TRANSPOSE_A, ctypes.byref(transposed), ctypes.c_size_t(4))
        self._do("MatmulPreferenceCreate", ctypes.byref(self._preference))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        scratch = ctypes.c_void_p(self._workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES)
        self._workspaces = (ctypes.c_void_p(), ctypes.c_size_t(0)), scratch  # without and with
        self._one, self._zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        self._layouts: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def algorithms(self, m: int, n: int, k: int) -> list[Algorithm]:
        """The algorithms that the heuristic names for these sizes, its favourite first; then those without a workspace, likewise."""
        found: dict[tuple[int, ...], Algorithm] = {}
        for scratch in (WORKSPACE_BYTES, 0):
            for algorithm in self._algorithms(m, n, k, scratch):
                found.setdefault(algorithm.config, algorithm)
        return list(found.values())

    def _algorithms(self, m: int, n: int, k: int, scratch: int) -> list[Algorithm]:
        found, count = (Found * MOST)(), ctypes.c_int()
        w, x, out = self._of(m, n, k)
        self._do(
            "MatmulPreferenceSetAttribute", self._preference, MAX_WORKSPACE, ctypes.byref(ctypes.c_size_t(scratch)),
            ctypes.c_size_t(8),
        )  # fmt: skip
        self._do(
            "MatmulAlgoGetHeuristic", self._handle, self._operation, w, x, out, out, self._preference, MOST, found,
            ctypes.byref(count),
        )  # fmt: skip
        return [Algorithm(self._config(each), each) for each in found[: count.value] if each.state == 0]

    def run(self, x: Tensor, w: Tensor, out: Tensor, algorithm: Algorithm, *, add: bool = False) -> None:
        """x [m, k], w [n, k], out [m, n], dense; `add` to what is there. RuntimeError when the library refuses."""
        layouts = self._of(x.shape[0], *w.shape)
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        at = ctypes.c_void_p(out.data_ptr())
        self._do(
            "Matmul", self._handle, self._operation, self._one, ctypes.c_void_p(w.data_ptr()), layouts[0],
            ctypes.c_void_p(x.data_ptr()), layouts[1], self._one if add else self._zero, at, layouts[2], at, layouts[2],
            ctypes.byref(algorithm.found.algorithm), *self._workspaces[algorithm.config[-1]], stream,
        )  # fmt: skip

    def _of(self, m: int, n: int, k: int) -> tuple[Any, Any, Any]:
        """Layouts of w, x and out. The library counts columns first: a dense [m, n] of ours is its n x m."""
        layouts = self._layouts.get((n, k))
        if layouts is None:
            layouts = self._layouts[n, k] = (self._layout(k, n), self._layout(k, m), self._layout(n, m))
        rows = ctypes.byref(ctypes.c_uint64(m))
        for layout in layouts[1:]:
            self._do("MatrixLayoutSetAttribute", layout, COLUMNS, rows, ctypes.c_size_t(8))
        return layouts

    def _layout(self, rows: int, columns: int) -> Any:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        self._do("MatrixLayoutCreate", ctypes.byref(layout), self._type, *sizes)
        return layout

    def _config(self, found: Found) -> tuple[int, ...]:
        values = []
        for attribute, size in CONFIG:
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            self._do(
                "MatmulAlgoConfigGetAttribute", ctypes.byref(found.algorithm), attribute, ctypes.byref(value),
                ctypes.c_size_t(size), ctypes.byref(written),
            )  # fmt: skip
            values.append(value.value)
        return *values, int(found.workspace > 0)

    def _do(self, what: str, *arguments: Any) -> None:
        status = getattr(self._lt, f"cublasLt{what}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{what} failed with status {status}")
