"""Steps with long contexts on the GPU engine alone, without the mesh: a chunk of a prompt beside decodes, and decodes alone.

    python -P benchmarks/long_steps.py MODEL [--chunks 1024 2048 ...] [--starts 0 24576 ...] [--decodes 0 3] [--context 32000]
                                       [--kernels] [--json FILE] [engine flags]

A step computes `chunk` tokens of a prompt of which `start` are computed, beside so many decodes with a context. Two steps are in
flight, as in the mesh; `step_ms` is wall time a step. The cache holds random numbers, dummy weights.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from engine_step import make_engine
from mixed_step import columns, kernels, run

from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row

STEPS = 6


def rows_of(count: int, length: int, block_size: int) -> list[NewRow]:
    blocks = -(-length // block_size)
    sampling = SamplingParams(max_tokens=64, temperature=0.0, seed=1)
    return [
        NewRow(
            Row(row),
            (np.arange(length - 64, dtype=np.int32) * 7 + row).tobytes(),
            length - 64,
            np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32).tobytes(),
            sampling,
        )
        for row in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 1536, 2048, 4096, 8192])
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 12288, 24576])
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--context", type=int, default=32000)
    parser.add_argument("--kernels", action="store_true", help="microseconds by kernel of steps of both")
    parser.add_argument("--json")
    arguments, extra = parser.parse_known_args()
    longest = max(arguments.context, max(arguments.starts) + max(arguments.chunks)) + 128
    most = max(1, *arguments.decodes) + 1
    engine = make_engine(arguments.model, ["--max-model-len", longest, "--max-num-seqs", most, *extra])
    rows = rows_of(most, longest, engine.facts.block_size)
    engine.step(columns(rows, [0] * most, [16] * most, rows), 0).wait()
    for cache in engine.compute.caches:
        cache.keys.normal_()
        cache.values.normal_()
    results: list[dict[str, Any]] = []

    def measure(decodes: int, start: int, chunk: int) -> None:
        chosen = [*rows[:decodes], *rows[most - 1 :]] if chunk else rows[:decodes]
        starts, counts = [arguments.context] * decodes, [1] * decodes
        plan = columns(chosen, starts + [start] * (chunk > 0), counts + [chunk] * (chunk > 0), [])
        run(engine, plan, 2)
        step_ms = round(run(engine, plan, STEPS), 2)
        results.append({"decodes": decodes, "start": start, "chunk": chunk, "step_ms": step_ms})
        print(json.dumps(results[-1]), flush=True)
        if arguments.kernels and chunk and decodes:
            results[-1]["kernels"] = kernels(engine, plan)

    for decodes in range(1, most):
        measure(decodes, 0, 0)
    for chunk in arguments.chunks:
        for start in arguments.starts:
            for decodes in arguments.decodes:
                measure(decodes, start, min(chunk, engine.resolved.max_num_batched_tokens - decodes))
    if arguments.json:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": Path(arguments.model).name}
        report |= {"context": arguments.context}
        Path(arguments.json).write_text(json.dumps({**report, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
