"""What it costs to wait until all programs have finished a phase: a barrier of the grid inside one kernel, against the end of a kernel.

    python -P benchmarks/phase_boundary.py [--programs 132 264] [--floats 128 1024] [--json FILE]

Each phase reads what another program wrote in the one before, adds one, and writes. It says whether layers are worth computing in one
kernel: what such a kernel saves is the boundaries. docs/performance.md has the figures of an H200.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from meshlm.kernels.measure import keep, replay_us

PHASES, REPLAYS = 280, 30


@triton.jit
def _seen(counter):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _phase(x, out, program, PROGRAMS: tl.constexpr, FLOATS: tl.constexpr):
    at = tl.arange(0, FLOATS)
    other = (program * 37 + 11) % PROGRAMS
    tl.store(out + program * FLOATS + at, tl.load(x + other * FLOATS + at, cache_modifier=".cg") + 1.0)


@triton.jit
def _all_phases(x, out, counter, PHASES: tl.constexpr, PROGRAMS: tl.constexpr, FLOATS: tl.constexpr):
    """All programs run at once, or this never ends."""
    for phase in range(PHASES):
        _phase(x, out, tl.program_id(0), PROGRAMS, FLOATS)
        x, out = out, x
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        while _seen(counter) < (phase + 1) * PROGRAMS:
            pass
        tl.debug_barrier()


@triton.jit
def _one_phase(x, out, PROGRAMS: tl.constexpr, FLOATS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _phase(x, out, tl.program_id(0), PROGRAMS, FLOATS)


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def measure(programs: int, floats: int) -> dict[str, Any]:
    """Microseconds of a phase, each way."""
    x = torch.zeros(programs, floats, device="cuda")
    out, counter = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32, device="cuda")
    sizes = {"PROGRAMS": programs, "FLOATS": floats, "num_warps": 4}

    def one_kernel() -> None:
        counter.zero_()
        _all_phases[(programs,)](x, out, counter, PHASES=PHASES, **sizes)

    def kernels(pdl: bool) -> None:
        for phase in range(PHASES):
            both = (out, x) if phase % 2 else (x, out)
            _one_phase[(programs,)](*both, PDL=pdl, **sizes, **({"launch_pdl": True} if pdl else {}))

    ways = {"grid_barrier_us": one_kernel, "pdl_kernel_us": lambda: kernels(True), "kernel_us": lambda: kernels(False)}
    found = {name: round(replay_us(graph_of(work), REPLAYS) / PHASES, 2) for name, work in ways.items()}
    return {"programs": programs, "floats": floats, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, nargs="+", default=[132, 264])
    parser.add_argument("--floats", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = [measure(programs, floats) for programs in arguments.programs for floats in arguments.floats]
    for line in results:
        print(line, flush=True)
    keep(results, arguments.json)


if __name__ == "__main__":
    main()
