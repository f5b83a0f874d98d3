"""`meshlm bench`: the benchmarks of `vllm bench`, with the same flags and the same reported metrics."""

import argparse
import importlib


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="measure throughput, latency, starts or a running server")
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    for name in ("offline", "serve", "sweep"):
        module = importlib.import_module(f"meshlm.supervisor.bench.{name}")
        module.add_parser(kinds)
        if hasattr(module, "run"):  # else each of its benchmarks has its own
            kinds.choices[name].set_defaults(run=module.run)
