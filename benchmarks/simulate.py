"""Many ranks in simulated time: the real coordinator and schedulers, modelled GPUs, links and detokenizers.

    python -P benchmarks/simulate.py [--ranks 1 8 64 1024] [--requests-per-rank 200] [--traffic shared-prefix multi-turn]
        [--routing cache-aware least-loaded round-robin] [--rate 12] [--json FILE]

What is real: coordinator/core.py and scheduler_proc/core.py with everything in them, fed with the messages they get in a mesh. What is
modelled: the time of a step (fitted to benchmarks/results/engine_step_*.json), a fixed delay per message, and detokenizers that
only note when tokens come. The coordinator's cost is real: the CPU time of its handle() calls on this machine, and of the encoding
and decoding of a sample of its messages. It is not charged to the simulated clock: `coordinator_busy` says what it would be.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
import harness
from simulated_mesh import World
from simulated_traffic import fitted


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests-per-rank", type=int, default=300)
    parser.add_argument("--max-requests", type=int, default=1_000_000, help="in one run, whatever the number of ranks")
    parser.add_argument("--traffic", nargs="+", default=["shared-prefix", "multi-turn"])
    parser.add_argument("--routing", nargs="+", default=["cache-aware", "least-loaded", "round-robin"])
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second and rank")
    parser.add_argument("--output-tokens", type=float, default=100, help="mean output length, exponential, at most 400")
    parser.add_argument("--kv-tokens", type=int, default=131_072, help="KV cache of a rank")
    parser.add_argument("--ranks-per-detokenizer", type=int, default=16)
    parser.add_argument("--steps-from", default="engine_step_llama3-8b_h200.json", help="in benchmarks/results")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.timing = fitted(Path(__file__).parent / "results" / options.steps_from)
    report: dict[str, Any] = {
        "options": {name: value for name, value in vars(options).items() if name not in ("timing", "json")},
        "timing": msgspec.to_builtins(options.timing),
        "results": [],
    }
    for num_ranks in options.ranks:
        for kind in options.traffic:
            for routing in options.routing:
                begun = time.perf_counter()
                gc.collect()
                gc.disable()  # the coordinator has a process and a small heap of its own
                requests = min(options.max_requests, num_ranks * options.requests_per_rank)
                world = World(options, num_ranks, routing, kind, requests)
                world.run()
                row = {"ranks": num_ranks, "traffic": kind, "routing": routing, **world.result()}
                row["wall_s"] = round(time.perf_counter() - begun, 1)
                report["results"].append(row)
                print(json.dumps(row), flush=True)
                harness.keep(options.json, report)


if __name__ == "__main__":
    main()
