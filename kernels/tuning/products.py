"""Measures products on this GPU for the tuner: a model's sizes, every candidate beside the plain way, each proven before it is timed.

    gemv           one row: tiles, beside cuBLAS with a norm and a gate of their own
    gemm           cuBLAS's algorithms, beside its first choice
    small_m_gemm   some rows: tiles, beside the product as `gemm` computes it and the kernel behind it
    gate_up_silu   many rows: tiles, beside the product and the gate
    packed_few     few rows times 4 bits (packed.py): tiles, beside what kernels/packed_gemm does
    grouped_gemm   a layer of experts (experts.py): kernels and tiles, beside those that follow from rules
    mxfp4_few      a layer of experts with MXFP4 weights: tiles, beside what kernels/mxfp4_experts does
    mxfp4_experts  the same with many rows: that kernel's tiles

Weights are random and of several layers, so that each comes from memory. Compiling is what takes long, so few candidates are tried
where time is short; `full` tries all.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.gate_up_silu import tune as gate_up_tune
from meshlm.kernels.gemm import kernel as gemm
from meshlm.kernels.gemm import tune as gemm_tune
from meshlm.kernels.gemm.cublaslt import TYPES, library
from meshlm.kernels.gemv import bench as gemv_bench
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.measure import replay_us
from meshlm.kernels.norm.kernel import add_rms_norm, rms_norm
from meshlm.kernels.packed_few import plan as packed_few
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.kernels.small_m_gemm import tune as small_m_tune
from meshlm.kernels.tuning import experts, mxfp4, packed
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Key, Work

T = TypeVar("T")
OFF = 0.02  # of the result's norm: more than rounding
COMPILE_S = 1.5  # of a few candidates, several at a time
PIECE_S = 0.05  # of anything else
TURNS = 3
FAR = 1.05  # times the fastest: not timed again
FEW, MANY = 6, 40  # candidates that are compiled where time is short; of experts at most
SIZES = {
    "gemv": [1],
    "gemm": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
    "small_m_gemm": [8, 16, 32, 64, 128],
    "gate_up_silu": [1024, 2048, 4096, 8192],
    "packed_few": list(packed_few.SIZES),
}
ALL_SIZES = {**SIZES, "gemm": gemm_tune.ROWS, "small_m_gemm": small_m_tune.ROWS, "gate_up_silu": gate_up_tune.ROWS}
Run = Callable[[Tensor], Tensor]  # from a weight to what the layer behind gets
Timer = Callable[[], float]  # microseconds of one run


class Setting(NamedTuple):
    """Where it is measured, and how thoroughly."""

    device: torch.device
    dtype: torch.dtype
    max_rows: int
    full: bool = False


class ProductBench:
    """See `meshlm.kernels.tuning.core.Bench`. begin: how a run is timed, over and over."""

    def __init__(self, setting: Setting, begin: "Callable[[Run, list[Tensor]], Timer] | None" = None) -> None:
        self._device, self._dtype, self._max_rows, self._full = setting
        self._begin = begin or captured
        self._weights: tuple[tuple[int, int], list[Tensor]] = ((0, 0), [])
        self._residual = torch.zeros(0)  # that a norm behind a product adds to; empty before each proof

    def sizes(self, op: str, key: Key) -> list[int]:
        """Nothing is tried that this GPU has no kernel for."""
        if op in (*mxfp4.OPS, "grouped_gemm"):
            if self._dtype != torch.bfloat16:
                return []
            layer, every = Layer(*key), partial(mxfp4.sizes, op) if op in mxfp4.OPS else experts.sizes
            return [size for size in every(layer, self._device, full=self._full) if size <= self._max_rows]
        if self._dtype not in TYPES or (op == "gemm" and library() is None):
            return []
        if op == "gate_up_silu" and (not pdl.supported() or key[0] % 16 or key[1] % 8):  # it reads by TMA
            return []
        return [size for size in (ALL_SIZES if self._full else SIZES)[op] if size <= self._max_rows]

    def measure(self, case: Case) -> Work:
        """See `Bench.measure`."""
        yield PIECE_S
        weights, runs = self._ways(case)
        if case.op != "gemm":
            yield COMPILE_S
            _compile(runs, weights[0], self._device)
        self._residual.zero_()
        expected = runs[PLAIN](weights[0]).clone()  # experts write all results to one place
        right = {PLAIN: runs[PLAIN]}
        for config, run in runs.items():
            yield PIECE_S
            self._residual.zero_()
            if config != PLAIN and computes(run, weights[0], expected, self._device):
                right[config] = run
        timers: dict[Config, Timer] = {}
        for config, run in right.items():
            yield PIECE_S
            timer = attempted(lambda run=run: self._begin(run, weights), self._device)  # type: ignore[misc]
            if timer is not None:
                timers[config] = timer
        if PLAIN not in timers:
            return {}
        taken: dict[Config, list[float]] = {config: [] for config in timers}
        for turn in range(TURNS):
            first = min((times[0] for times in taken.values() if times), default=0.0)
            for config, timer in timers.items():
                if turn and config != PLAIN and taken[config][0] > FAR * first:
                    continue
                yield PIECE_S
                taken[config].append(timer())
        return {config: sorted(times)[TURNS // 2] for config, times in taken.items() if len(times) == TURNS}

    def _ways(self, case: Case) -> tuple[list[Tensor], dict[Config, Run]]:
        """Weights, and the plain way and all candidates to multiply with one."""
        if case.op == "grouped_gemm":
            return self._of_experts(case)
        if case.op in mxfp4.OPS:
            self._weights = ((0, 0), [])
            return mxfp4.ways(case, self._device, self._dtype, most=MANY if self._full else FEW)
        if case.op == packed_few.OP:
            self._weights = ((0, 0), [])  # their memory is free before others are made
            return packed.ways(case, self._device, self._dtype, most=MANY if self._full else FEW)
        return self._weights_of(case), self._runs(case)

    def _weights_of(self, case: Case) -> list[Tensor]:
        """Enough of them that each comes from memory; those of the last case, if they are of these sizes."""
        outputs, inputs = case.key[:2]
        shape = (outputs * 2 if case.op == "gemv" and case.key[2] else outputs, inputs)
        if self._weights[0] != shape:
            self._weights = ((0, 0), [])  # their memory is free before others are made
            copies = max(2, min(16, gemm_tune.WEIGHT_BYTES // (2 * shape[0] * shape[1])))
            make: dict[str, Any] = {"device": self._device, "dtype": self._dtype}
            self._weights = (shape, [torch.randn(*shape, **make) * shape[1] ** -0.5 for _ in range(copies)])
        return self._weights[1]

    def _runs(self, case: Case) -> dict[Config, Run]:
        """The plain way and all candidates."""
        inputs = case.key[1]
        make: dict[str, Any] = {"device": self._device, "dtype": self._dtype}
        x, norm = torch.randn(case.rows, inputs, **make), torch.ones(inputs, **make)
        if case.op == "gemv":
            return self._of_gemv(case, x, norm)
        if case.op == "gemm":
            return self._of_gemm(case, x)
        if case.op == "small_m_gemm":
            return self._of_small_m(case, x)
        return self._of_gate_up(case, x)

    def _of_experts(self, case: Case) -> tuple[list[Tensor], dict[Config, Run]]:
        """Runs have weights of their own, of a whole layer."""
        self._weights = ((0, 0), [])  # their memory is free before others are made
        layer = Layer(*case.key)
        runs = experts.Runs(layer, case.rows, self._device, self._dtype)
        usual, *others = experts.candidates(layer, case.rows, most=MANY if self._full else FEW)
        found: dict[Config, Run] = {PLAIN: lambda _: runs.of(usual)}
        for each in others:
            found[experts.config_of(each)] = lambda _, each=each: runs.of(each)  # type: ignore[misc]
        return [torch.empty(0, device=self._device)], found

    def _of_gemv(self, case: Case, x: Tensor, norm: Tensor) -> dict[Config, Run]:
        """With the norm that is in front of gate and up and of query, key and value, which have more outputs than inputs: what each
        program does before it multiplies decides how many there should be."""
        outputs, inputs, gate = case.key
        normed = gate or outputs > inputs
        options: dict[str, Any] = {"norm": norm, "eps": 1e-6} if normed else {}

        def plain(w: Tensor) -> Tensor:
            out = F.linear(rms_norm(x, norm, 1e-6) if normed else x, w)
            return silu_mul(out) if gate else out

        runs: dict[Config, Run] = {PLAIN: plain}
        for tile in self._tiles(outputs, inputs, gate):
            runs[tile] = lambda w, tile=tile: gemv.gemv(x, w, gate="silu" if gate else "", shape=tile, **options)[0]  # type: ignore[misc]
        return runs

    def _tiles(self, outputs: int, inputs: int, gate: bool) -> list[gemv.Tile]:
        """The tile that is used without a measurement, and others that have room."""
        usual = gemv.shape_of(outputs, inputs, gate)
        others = gemv_bench.likely(inputs, gate, 2) if self._full else gemv_bench.likely(inputs, gate, 1)[:FEW]
        return list(dict.fromkeys([usual, *others]))

    def _of_gemm(self, case: Case, x: Tensor) -> dict[Config, Run]:
        products = gemm.products_of(self._device, self._dtype)
        out = torch.empty(case.rows, case.key[0], device=x.device, dtype=x.dtype)
        runs: dict[Config, Run] = {PLAIN: lambda w: F.linear(x, w)}
        found = products.algorithms(case.rows, *case.key)
        for algorithm in found if self._full else found[: 2 * FEW]:

            def run(w: Tensor, algorithm: Any = algorithm) -> Tensor:
                products.run(x, w, out, algorithm)
                return out

            runs[algorithm.config] = run
        return runs

    def _of_small_m(self, case: Case, x: Tensor) -> dict[Config, Run]:
        outputs, _, use = case.key
        residual = self._residual = torch.zeros(case.rows, outputs, device=x.device, dtype=x.dtype)
        norm = torch.ones(outputs, device=x.device, dtype=x.dtype)

        def behind(product: Tensor) -> Tensor:
            """The norm adds parts up, and the plain way has it behind the product too."""
            return add_rms_norm(product, residual, norm, 1e-6) if use == "parts" else product

        def plain(w: Tensor) -> Tensor:
            out = behind(gemm.gemm(x, w))
            return silu_mul(out) if use == "gate" else out

        runs: dict[Config, Run] = {PLAIN: plain}
        for shape in self._small_shapes(case):
            runs[tuple(shape)] = lambda w, shape=shape: behind(small_m_gemm.small_m_gemm(x, w, shape, use))  # type: ignore[misc]
        return runs

    def _small_shapes(self, case: Case) -> list[small_m_gemm.Shape]:
        outputs, inputs, use = case.key
        tiles = 2 if use == "gate" else 1
        room = gemv.shared_bytes()
        found = [
            shape
            for shape in small_m_tune.candidates(case.rows, (outputs, inputs, use))
            if (shape.block_m + tiles * shape.block_n) * shape.block_k * 2 * shape.stages <= room
        ]
        wanted = 2 * pdl.multiprocessors(self._device)

        def distance(shape: small_m_gemm.Shape) -> float:
            programs: float = outputs // tiles / shape.block_n * shape.splits * -(-case.rows // shape.block_m)
            return max(programs / wanted, wanted / programs)

        return found if self._full else sorted(found, key=distance)[:FEW]

    def _of_gate_up(self, case: Case, x: Tensor) -> dict[Config, Run]:
        runs: dict[Config, Run] = {PLAIN: lambda w: silu_mul(gemm.gemm(x, w))}
        shapes = gate_up_tune.CANDIDATES
        for shape in shapes if self._full else shapes[:: len(shapes) // FEW]:
            runs[tuple(shape)] = lambda w, shape=shape: gate_up_silu.gate_up_silu(x, w, shape)  # type: ignore[misc]
        return runs


def _compile(runs: dict[Config, Run], weight: Tensor, device: torch.device) -> None:
    """Has all kernels at once; what cannot be compiled says so when it is tried."""
    with precompiled():
        for run in runs.values():
            attempted(lambda run=run: run(weight), device)  # type: ignore[misc]


def attempted(work: Callable[[], T], device: torch.device) -> T | None:
    """What the work gives; None where a compiler or a driver says that it cannot be done: no kernel is worth the process."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # Triton's errors have no class in common with the driver's
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises if the GPU itself has failed
        return None


def computes(run: Run, weight: Tensor, expected: Tensor, device: torch.device) -> bool:
    """Whether the candidate can be launched, and gives what the plain way gives."""

    def off() -> float:
        found = run(weight).float()
        return float((found - expected.float()).norm() / expected.float().norm())

    error = attempted(off, device)
    return error is not None and error <= OFF  # NaN is not


def captured(run: Run, weights: list[Tensor]) -> Timer:
    """A CUDA graph of a run with each of the weights. Other threads may use the GPU meanwhile, as those of NCCL do."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for weight in weights:
            run(weight)
    repeats = max(1, int(PIECE_S / 10 * 1e6 / max(1.0, replay_us(graph, 1))))
    return lambda: replay_us(graph, repeats) / len(weights)


assert all(small < large for sizes in ALL_SIZES.values() for small, large in pairwise(sizes))
