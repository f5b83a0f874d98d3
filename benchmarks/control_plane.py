"""The control plane alone: the whole mesh with the fake device, N streams, CPU µs per output token of each process.

    python -P benchmarks/control_plane.py [--streams 256] [--n 1] [--step-ms 20] [--tokens 500] [--floor] [--rounds 1] [--json FILE]

With --step-ms 20 every step's tokens leave as one chunk each; with 0 the mesh runs freely and chunks coalesce only under
back-pressure. The client is one bare socket reader in this process; its CPU is not counted.

`cpu_us_per_token` is of the whole run, with the requests' beginnings and ends; `decoding` of the half of it in which all streams do
nothing but decode. With --floor each round also measures, in the same minutes and with the same client, what this machine takes for the
sends alone and for a mesh of nothing but columns (floor.py): the machine's speed changes from day to day, the ratio less.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import floor
import harness
from harness import Mesh, Stream, cpu_seconds, run_seconds


async def load(
    port: int, streams: int, tokens: int, readers: list[Stream] | None = None, n: int = 1
) -> tuple[float, list[Stream]]:
    """All streams at once, n in each request; seconds from first to last byte. The readers appear in `readers` as they begin."""
    readers = [] if readers is None else readers
    begun = time.perf_counter()
    for number in range(streams // n):
        readers.append(await Stream.begin(port, {"prompt": [300 + number] * 32, "max_tokens": tokens, "n": n}))
    await asyncio.gather(*(reader.done for reader in readers))
    return time.perf_counter() - begun, readers


async def watched(
    port: int, streams: int, tokens: int, n: int, pids: dict[str, int]
) -> tuple[float, list[Stream], dict[str, float]]:
    """`load`, and CPU µs per token of each process while all streams decode, for streams of one token a chunk."""
    readers: list[Stream] = []
    loading = asyncio.ensure_future(load(port, streams, tokens, readers, n))

    async def count_after(share: float) -> int:
        # The readers are the measured client, and tell nobody.
        while len(readers) < streams // n or any(r.events < share * tokens * n for r in readers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return sum(reader.events for reader in readers)

    begin = await count_after(0.25)
    before = {name: run_seconds(pid) for name, pid in pids.items()}
    num_tokens = await count_after(0.75) - begin
    used = {name: (run_seconds(pid) - before[name]) * 1e6 / num_tokens for name, pid in pids.items()}
    return *await loading, used


async def first_tokens(port: int, count: int) -> list[float]:
    """TTFT in seconds of single requests through the idle mesh."""
    found = []
    for _ in range(count):
        _, (reader,) = await load(port, 1, 1)
        found.append(reader.first - reader.begun)
    return found


def measure(arguments: argparse.Namespace, step_ms: float) -> dict[str, object]:
    flags = ["--device", "fake", "--fake-step-ms", str(step_ms), "--max-model-len", "4096"]
    flags += ["--frontends", str(arguments.pairs), "--detokenizers", str(arguments.pairs)]
    with Mesh(flags) as mesh:
        pids = mesh.pids()
        ttft = [] if step_ms else asyncio.run(first_tokens(mesh.port, 100))
        asyncio.run(load(mesh.port, arguments.streams, 20, n=arguments.n))
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        decoding: dict[str, float] = {}
        if step_ms:
            run = watched(mesh.port, arguments.streams, arguments.tokens, arguments.n, pids)
            elapsed, readers, decoding = asyncio.run(run)
        else:
            elapsed, readers = asyncio.run(load(mesh.port, arguments.streams, arguments.tokens, n=arguments.n))
        total = arguments.streams * arguments.tokens
        used = {name: (cpu_seconds(pid) - before[name]) * 1e6 / total for name, pid in pids.items()}
        memory = mesh.rss_mib()
    plane = plane_of(used)
    result: dict[str, object] = {
        "streams": arguments.streams,
        "n": arguments.n,
        "step_ms": step_ms,
        "tokens": total,
        "pairs": arguments.pairs,
        "seconds": round(elapsed, 3),
        "output_tokens_per_s": round(total / elapsed),
        "tokens_per_chunk": round(total / max(1, sum(reader.events for reader in readers)), 2),
        "cpu_us_per_token": {name: round(value, 3) for name, value in used.items()},
        "cpu_us_per_token_plane": round(plane, 3),
        "output_tokens_per_s_per_core": round(1e6 / (plane + used["worker/0"])),
        "rss_mib": memory,
    }
    if decoding:
        result["decoding_us_per_token"] = {name: round(value, 3) for name, value in decoding.items()}
        result["decoding_us_per_token_plane"] = round(plane_of(decoding), 3)
    if ttft:
        result["ttft_ms"] = harness.milliseconds(ttft)
    return result


def plane_of(used: dict[str, float]) -> float:
    """All but the workers."""
    return sum(value for name, value in used.items() if not name.startswith("worker"))


def with_floor(result: dict[str, object], arguments: argparse.Namespace, step_ms: float) -> dict[str, object]:
    """The same, beside what the machine takes at the least right now."""

    def run(port: int, streams: int, tokens: int) -> object:
        return asyncio.run(load(port, streams, tokens))

    found = floor.measure(run, arguments.streams, 300, step_ms / 1e3)
    plane = result["decoding_us_per_token_plane"]
    assert isinstance(plane, float)
    assert isinstance(found["mesh_plane"], float)
    return {**result, "floor_us_per_token": found, "times_the_floor": round(plane / found["mesh_plane"], 2)}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--n", type=int, default=1, help="streams of each request (choices); divides --streams")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 0.0])
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=1, help="frontends and detokenizers")
    parser.add_argument("--floor", action="store_true", help="also measure the least (with steps of some length)")
    parser.add_argument("--rounds", type=int, default=1, help="of all measurements")
    arguments = parser.parse_args()
    results = []
    for step_ms in arguments.step_ms * arguments.rounds:
        result = measure(arguments, step_ms)
        results.append(with_floor(result, arguments, step_ms) if arguments.floor and step_ms else result)
        print(json.dumps(results[-1], indent=1))
    harness.keep(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
