"""Measures operations on this GPU for the tuner: a model's sizes, every candidate beside the plain way, each verified before its time.

    gemv           one row: tiles, beside cuBLAS with a norm and a gate of their own
    gemm           cuBLAS's algorithms, beside its first choice
    small_m_gemm   some rows: tiles, beside the product as `gemm` computes it and the kernel behind it
    gate_up_silu   many rows: tiles, beside the product and the gate
    packed_few     few rows times 4 bits (packed.py): tiles, beside what kernels/packed_gemm does
    grouped_gemm   a layer of experts: kernels and tiles, beside those that follow from rules
    packed_experts       a layer of experts with packed weights: tiles of direct.py, beside what kernel.py does (packed_experts.py)
    packed_experts_many  the same with many rows: tiles of kernel.py

The ways to compute each stand beside its record. Weights are random and of several layers, so that each comes from memory. Compiling is
what takes long, so few candidates are tried where time is short; `full` tries all.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.gate_up_silu import op as gate_up_silu
from meshlm.kernels.gemm import op as gemm
from meshlm.kernels.gemm.cublaslt import TYPES, library
from meshlm.kernels.gemv import op as gemv
from meshlm.kernels.grouped_gemm import op as experts
from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.measure import replay_us
from meshlm.kernels.packed_few import plan as packed_few
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.small_m_gemm import op as small_m_gemm
from meshlm.kernels.tuning import packed, packed_experts
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Key, Run, Setting, Ways, Work

T = TypeVar("T")
OFF = 0.02  # of the result's norm: more than rounding
COMPILE_S = 1.5  # of a few candidates, several at a time
PIECE_S = 0.05  # of anything else
TURNS = 3
FAR = 1.05  # times the fastest: not timed again
FEW, MANY = 6, 40  # candidates that are compiled where time is short; of experts at most
WEIGHT_BYTES = 200 << 20  # copies of a small weight fill the L2 cache many times: a model's layers do
WITH_WEIGHTS = {
    "gemv": gemv.ways,
    "gemm": gemm.ways,
    "small_m_gemm": small_m_gemm.ways,
    "gate_up_silu": gate_up_silu.ways,
}
SIZES = {
    "gemv": [1],
    "gemm": gemm.QUICK_ROWS,
    "small_m_gemm": small_m_gemm.QUICK_ROWS,
    "gate_up_silu": gate_up_silu.QUICK_ROWS,
    "packed_few": list(packed_few.SIZES),
}
ALL_SIZES = {**SIZES, "gemm": gemm.ROWS, "small_m_gemm": small_m_gemm.ROWS, "gate_up_silu": gate_up_silu.ROWS}
Timer = Callable[[], float]  # microseconds of one run


class ProductBench:
    """The bench of a start (core.py: `Bench`). begin: how a run is timed, over and over."""

    def __init__(self, setting: Setting, begin: "Callable[[Run, list[Tensor]], Timer] | None" = None) -> None:
        self._setting, self._begin = setting, begin or captured
        self._weights: tuple[tuple[int, int], list[Tensor]] = ((0, 0), [])

    def sizes(self, op: str, key: Key) -> list[int]:
        """Nothing is tried that this GPU has no kernel for."""
        device, dtype, max_rows, full = self._setting
        if op in (*packed_experts.OPS, "grouped_gemm"):
            if dtype != torch.bfloat16:
                return []
            if op in packed_experts.OPS:
                found = packed_experts.sizes(op, key, device, full=full)
            else:
                found = experts.sizes(Layer(*key), device, full=full)
            return [size for size in found if size <= max_rows]
        if dtype not in TYPES or (op == "gemm" and library() is None):
            return []
        if op == "gate_up_silu" and (not pdl.supported() or key[0] % 16 or key[1] % 8):  # it reads by TMA
            return []
        return [size for size in (ALL_SIZES if full else SIZES)[op] if size <= max_rows]

    def measure(self, case: Case) -> Work:
        """The times of the plain way and of those candidates that compute the same."""
        device = self._setting.device
        yield PIECE_S
        weights, runs, reset = self._ways(case)
        if case.op != "gemm":
            yield COMPILE_S
            _compile(runs, weights[0], device)
        reset()
        expected = runs[PLAIN](weights[0]).clone()  # experts write all results to one place
        right = {PLAIN: runs[PLAIN]}
        for config, run in runs.items():
            yield PIECE_S
            reset()
            if config != PLAIN and computes(run, weights[0], expected, device):
                right[config] = run
        timers: dict[Config, Timer] = {}
        for config, run in right.items():
            yield PIECE_S
            timer = attempted(lambda run=run: self._begin(run, weights), device)  # type: ignore[misc]
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

    def _ways(self, case: Case) -> Ways:
        setting, most = self._setting, MANY if self._setting.full else FEW
        if case.op in WITH_WEIGHTS:
            return WITH_WEIGHTS[case.op](case, setting, self._weights_of, FEW)
        self._weights = ((0, 0), [])  # their memory is free before others are made
        if case.op == packed_few.OP:
            return packed.ways(case, setting, max(2, min(16, WEIGHT_BYTES // packed.num_bytes(case.key))), most)
        if case.op in packed_experts.OPS:
            return packed_experts.ways(case, setting, most)
        return experts.ways(case, setting, most)

    def _weights_of(self, outputs: int, inputs: int) -> list[Tensor]:
        """Enough of them that each comes from memory; those of the last case, if they are of these sizes."""
        if self._weights[0] != (outputs, inputs):
            self._weights = ((0, 0), [])  # their memory is free before others are made
            copies = max(2, min(16, WEIGHT_BYTES // (2 * outputs * inputs)))
            device, dtype = self._setting.device, self._setting.dtype
            made = [torch.randn(outputs, inputs, device=device, dtype=dtype) * inputs**-0.5 for _ in range(copies)]
            self._weights = ((outputs, inputs), made)
        return self._weights[1]


def _compile(runs: dict[Config, Run], weight: Tensor, device: torch.device) -> None:
    """Has all kernels at once; what cannot be compiled says so when it is tried."""
    with precompiled():
        for run in runs.values():
            attempted(lambda run=run: run(weight), device)  # type: ignore[misc]


def attempted(work: Callable[[], T], device: torch.device) -> T | None:
    """The result of the work; None where a compiler or a driver says that it cannot be done: no kernel is worth the process."""
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
