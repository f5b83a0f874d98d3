"""A decode step of some requests with other choices of kernels, in turns: what each is worth in the whole step.

    python -P benchmarks/step_choices.py MODEL [--requests 64] [--context 576] [--turns 5] [--json FILE]

Choices are of the product of query, key and value (kernels/small_m_gemm instead of cuBLAS) and of attention's tiles. `layer` lists the
kernels of a layer in the middle of the step, as it is and as it is the fastest: when each began and how long it took, microseconds.
Dummy weights. Each replay computes the same step, whose tokens choose the same experts.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshlm.kernels.attention.tiles import decode_tiles
from meshlm.kernels.measure import keep, replay_us
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.small_m_gemm.kernel import Shape as Small
from meshlm.workers.attention import triton_backend
from meshlm.workers.graphs.dispatcher import Key
from meshlm.workers.layers import triton_ops

sys.path.insert(0, str(Path(__file__).parent))
import engine_step

REPLAYS = 10
RESERVE = 64
PROJECTIONS = ["64 64 128 1 4 4", "64 32 128 1 4 4"]
ATTENTION = ["2 64 4 2", "2 32 2 3", "4 64 2 2", "4 32 2 3"]  # parts of a context, keys, warps, stages
Tile = tuple[int, ...]


class Choice(NamedTuple):
    """What is done otherwise. Nothing: as the tables say."""

    projection: Small | None = None
    attention: Tile | None = None


def _sizes(text: str) -> Tile:
    return tuple(map(int, text.split()))


def choices() -> dict[str, Choice]:
    """By name; the first is as it is."""
    found = {"as it is": Choice()}
    for sizes in PROJECTIONS:
        found[f"projection {sizes}"] = Choice(projection=Small(*_sizes(sizes)))
    for sizes in ATTENTION:
        found[f"attention {sizes}"] = Choice(attention=_sizes(sizes))
    return found


class Step:
    """A decode step whose choices can be changed."""

    def __init__(self, model: str, requests: int, context: int) -> None:
        self.choice, self._requests, self._projection = Choice(), requests, (0, 0)  # no choice while the engine is made
        self._shape = triton_ops.shape_for  # type: ignore[attr-defined]
        triton_ops.shape_for = self._shape_for  # type: ignore[assignment,attr-defined]
        triton_backend.decode_tiles = self._decode_tiles  # type: ignore[assignment,attr-defined]
        self.engine = engine_step.make_engine(model, [])
        engine_step.fill(self.engine, requests, context, RESERVE)
        self.engine.step(engine_step.decodes(requests, context), 0).wait()
        spec = self.engine.spec
        heads = spec.num_attention_heads + 2 * spec.num_key_value_heads
        self._projection = heads * spec.head_dim, spec.hidden_size
        self.key = Key(requests, requests)

    def _shape_for(self, rows: int, outputs: int, inputs: int, use: str) -> Small | None:
        mine = rows == self._requests and use == "product" and (outputs, inputs) == self._projection
        return self.choice.projection if mine and self.choice.projection else self._shape(rows, outputs, inputs, use)

    def _decode_tiles(self, programs: int, longest: int, device: torch.device, group: int, dim: int) -> Tile:
        mine = self.choice.attention if programs % self._requests == 0 else None
        return mine or decode_tiles(programs, longest, device, group, dim)

    def graph(self, choice: Choice) -> torch.cuda.CUDAGraph | None:
        """None where it does not fit the GPU."""
        self.choice = choice
        self.engine.graphs._graphs.pop(self.key, None)
        with torch.inference_mode():
            self.engine.graphs.make(self.key)
        return self.engine.graphs._graphs.get(self.key)

    def compile(self, wanted: list[Choice]) -> None:
        """All of them at once."""
        launch, padded = self.engine.compute, self.engine.graphs._capture
        with torch.inference_mode(), self.engine.model.shortened() as layers, precompiled():
            caches, launch.caches = launch.caches, launch.caches[:layers]
            for self.choice in wanted:
                padded(self.key)
            launch.caches = caches

    def layer(self, graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float]]:
        """Kernels of a layer: name, microseconds since the first one began, and how long it took."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        kernels = sorted((e["ts"], e["dur"], e["name"][:40]) for e in events if e.get("cat") == "kernel")
        attention = [nth for nth, (_, _, name) in enumerate(kernels) if name.startswith("_decode")]
        middle = len(attention) // 2
        begin, *_ = kernels[attention[middle]]
        one = kernels[attention[middle] : attention[middle + 1] + 1]
        return [(name, round(start - begin, 2), round(taken, 2)) for start, taken, name in one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    step = Step(arguments.model, arguments.requests, arguments.context)
    named = choices()
    usual = step.graph(Choice())
    assert usual is not None
    print("as it is", round(replay_us(usual, REPLAYS), 1), *step.layer(usual), sep="\n", flush=True)
    step.compile(list(named.values()))
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, choice in named.items():
        graph = step.graph(choice)
        if graph is not None:
            graphs[name] = graph
            print(name, round(replay_us(graph, REPLAYS), 1), flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(arguments.turns):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph, REPLAYS))
    results: list[dict[str, Any]] = [
        {"choice": name, "step_us": round(sorted(times[name])[arguments.turns // 2], 1) if name in times else None}
        for name in named
    ]
    for line in results:
        print(json.dumps(line), flush=True)
    best = min(times, key=lambda name: sorted(times[name])[arguments.turns // 2])
    layers = {name: step.layer(graphs[name]) for name in ("as it is", best)}
    print(best, *layers[best], sep="\n", flush=True)
    facts = {"model": Path(arguments.model).name, "requests": arguments.requests, "context": arguments.context}
    keep(results, arguments.json, **facts, layer=layers)


if __name__ == "__main__":
    main()
