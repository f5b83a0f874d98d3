"""Trees in turns: from `meshlm serve` to ready, and how fast one stream decodes then.

    python -P benchmarks/ready.py --tree OLD=BIN/meshlm --tree NEW=BIN/meshlm [--rounds 5] [--tokens 0] [--json FILE] -- FLAGS

`seconds` is wall time to the line that says so, `cpu_seconds` what all processes have used by then, which other work on the machine
changes less. With --tokens one greedy stream follows: `itl_ms` is the time between two tokens that a quarter of them stay below, for
the same reason, and `worker_cpu_ms` the worker's CPU time for a token. Modules are compiled before, as pip does: a start of each tree
that is not counted fills a folder for bytecode, whatever PYTHONDONTWRITEBYTECODE says.
"""

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import KeptStream, Mesh, descendants, run_seconds

Figures = dict[str, float]


def worker_of(pids: list[int]) -> int:
    return next(pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"meshlm: worker"))


async def stream(port: int, tokens: int) -> list[float]:
    """Seconds between the tokens of one stream."""
    body = {"prompt": [1000 + 13 * nth for nth in range(32)], "max_tokens": tokens, "temperature": 0.0}
    found = await KeptStream.begin(port, body)
    await found.done
    return [after - before for before, after in pairwise(found.times)]


def measure(meshlm: str, flags: list[str], tokens: int, bytecode: str) -> Figures:
    """bytecode: the folder into which a tree's modules are compiled once."""
    with Mesh(flags, program=[meshlm], PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE="") as mesh:
        pids = descendants(mesh.server.pid)
        found = {"seconds": mesh.ready_s, "cpu_seconds": sum(map(run_seconds, pids))}
        if tokens:
            worker = worker_of(pids)
            before = run_seconds(worker)
            waits = [wait for _ in range(3) for wait in asyncio.run(stream(mesh.port, tokens))]
            found["itl_ms"] = statistics.quantiles(waits, n=4)[0] * 1e3
            found["worker_cpu_ms"] = (run_seconds(worker) - before) * 1e3 / (3 * tokens)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tree", action="append", required=True, help="NAME=the meshlm command of a tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=0, help="of each of three streams; 0: none")
    parser.add_argument("flags", nargs="*", help="of meshlm serve, after --")
    arguments = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in arguments.tree)
    rounds: dict[str, list[Figures]] = {name: [] for name in trees}
    with contextlib.ExitStack() as folders:
        bytecode = {name: folders.enter_context(tempfile.TemporaryDirectory(prefix="mlm")) for name in trees}
        for number in range(arguments.rounds + 1):
            for name in sorted(trees, reverse=bool(number % 2)):
                found = measure(trees[name], arguments.flags, arguments.tokens if number else 0, bytecode[name])
                if number:
                    rounds[name].append(found)
                    print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
    medians = {
        name: {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
        for name, found in rounds.items()
    }
    print(json.dumps(medians, indent=1))
    harness.keep(arguments.json, {"flags": arguments.flags, "medians": medians, "rounds": rounds})


if __name__ == "__main__":
    main()
