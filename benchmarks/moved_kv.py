"""What moved KV gives: prefixes that were evicted, agents that come back, a mesh that is started again, prompts beside decodes.

    python -P benchmarks/moved_kv.py [MODEL ...flags] [--jobs evicted agents restart roles] [--json FILE]

Flags behind the model go to every mesh (`--load-format dummy`, `--device cuda`). Each job runs meshes in turns: without what it looks
at, and with it. Times to first token are of one request at a time, ITL of streams beside others' prompts.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import KeptStream, Mesh

BLOCK = 16
STORE = ["--kv-offloading-size", "4"]


def prompt(random: Random, count: int) -> list[int]:
    return [random.randrange(100, 10_000) for _ in range(count)]


async def stream(port: int, tokens: list[int], count: int) -> KeptStream:
    one = await KeptStream.begin(port, {"prompt": tokens, "max_tokens": count, "temperature": 0.0})
    await one.done
    if not one.complete:
        raise SystemExit(f"a stream broke: {bytes(one.data[:300])!r}")
    return one


def blocks(tokens: int) -> list[str]:
    return ["--num-gpu-blocks-override", str(tokens // BLOCK)]


async def first_tokens_s(mesh: Mesh, prompts: list[list[int]]) -> list[float]:
    """The time to the first token of each, one after the other."""
    found = [await stream(mesh.port, one, 2) for one in prompts]
    return [one.times[0] - one.begun for one in found]


def evicted(given: argparse.Namespace) -> dict[str, Any]:
    """Prompts that the device has no room for together, asked twice."""
    random = Random(1)
    prompts = [prompt(random, given.tokens) for _ in range(given.prompts)]
    flags = blocks(2 * given.tokens + 1024)
    found: dict[str, Any] = {"prompt_tokens": given.tokens, "prompts": given.prompts}
    for name, more in (("computed", []), ("host", STORE)):
        with Mesh([*given.flags, *flags, *more]) as mesh:
            for _ in range(3):  # cold, offered again, and as a user meets it
                seconds = asyncio.run(first_tokens_s(mesh, prompts))
        found[f"{name}_ttft_ms"] = harness.milliseconds(seconds)
    found["times"] = round(found["computed_ttft_ms"]["p50"] / found["host_ttft_ms"]["p50"], 2)
    return found


async def _agent(mesh: Mesh, seed: int, given: argparse.Namespace) -> int:
    """Turns of one agent: each adds to its text what it was answered, and what a tool said. The tokens that it got."""
    random, count = Random(seed), 0
    text = prompt(random, given.tokens // given.turns)
    for _ in range(given.turns):
        await stream(mesh.port, text, given.answer)
        count += given.answer
        text += prompt(random, given.tokens // given.turns)
    return count


async def agents_tok_s(mesh: Mesh, given: argparse.Namespace) -> float:
    begun = time.perf_counter()
    counts = await asyncio.gather(*(_agent(mesh, 10 + nth, given) for nth in range(given.users)))
    return sum(counts) / (time.perf_counter() - begun)


def agents(given: argparse.Namespace) -> dict[str, Any]:
    """Users whose contexts together take four times what the device holds."""
    flags = blocks(given.users * given.tokens // 4)
    found: dict[str, Any] = {"users": given.users, "turns": given.turns, "context": given.tokens}
    for name, more in (("without", []), ("host", STORE)):
        with Mesh([*given.flags, *flags, *more]) as mesh:
            found[f"{name}_tok_s"] = round(asyncio.run(agents_tok_s(mesh, given)), 1)
    found["times"] = round(found["host_tok_s"] / found["without_tok_s"], 2)
    return found


def restart(given: argparse.Namespace) -> dict[str, Any]:
    """A mesh with a second tier, started again: from its command to the first hit."""
    random = Random(2)
    prompts = [prompt(random, given.tokens) for _ in range(given.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*given.flags, *STORE, "--kv-offloading-path", folder, "--kv-offloading-disk-size", "8G"]
        with Mesh(flags) as mesh:
            for _ in range(2):
                device = asyncio.run(first_tokens_s(mesh, prompts))
        with Mesh(flags) as mesh:
            loaded = asyncio.run(first_tokens_s(mesh, prompts))
            ready_s = mesh.ready_s
    return {
        "prompt_tokens": given.tokens,
        "ready_s": round(ready_s, 2),
        "device_ttft_ms": harness.milliseconds(device),
        "disk_ttft_ms": harness.milliseconds(loaded),
    }


async def _bursts(mesh: Mesh, given: argparse.Namespace) -> dict[str, Any]:
    """Streams that decode while bursts of long prompts come."""
    random = Random(3)
    begun = time.perf_counter()
    decoding = [
        asyncio.ensure_future(stream(mesh.port, prompt(random, 32), given.decode)) for _ in range(given.streams)
    ]
    await asyncio.sleep(1.0)
    bursts = []
    for _ in range(given.bursts):
        bursts += [asyncio.ensure_future(stream(mesh.port, prompt(random, given.tokens), 16)) for _ in range(2)]
        await asyncio.sleep(given.burst_s)
    streams, long = [await one for one in decoding], [await one for one in bursts]
    seconds = time.perf_counter() - begun
    gaps = [after - before for one in streams for before, after in zip(one.times, one.times[1:], strict=False)]
    return {
        "itl_ms": harness.milliseconds(gaps),
        "ttft_ms": harness.milliseconds([one.times[0] - one.begun for one in long]),
        "tok_s": round((len(streams) * given.decode + 16 * len(long)) / seconds, 1),
    }


def roles(given: argparse.Namespace) -> dict[str, Any]:
    """Two ranks that do both, and one for prompts beside one that decodes."""
    found: dict[str, Any] = {"prompt_tokens": given.tokens, "streams": given.streams}
    for name, more in (("mixed", []), ("apart", ["--dp-roles", "prefill:1,decode:1"])):
        with Mesh([*given.flags, "-dp", "2", *more]) as mesh:
            found[name] = asyncio.run(_bursts(mesh, given))
    return found


JOBS = {"evicted": evicted, "agents": agents, "restart": restart, "roles": roles}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model", nargs="?", default="", help="default: SmolLM2 on the CPU")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    numbers = {
        "tokens": 3000,
        "prompts": 6,
        "users": 6,
        "turns": 6,
        "answer": 16,
        "streams": 4,
        "decode": 200,
        "bursts": 3,
    }
    for name, count in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--burst-s", type=float, default=4.0)
    given, rest = parser.parse_known_args()
    model = [given.model] if given.model else [str(harness.smollm2()), "--device", "cpu", "--dtype", "float32"]
    given.flags = [*model, "--max-model-len", str(given.tokens + 1024), *rest]
    report = {}
    for name in given.jobs:
        report[name] = JOBS[name](given)
        print(name, report[name], flush=True)
        harness.keep(given.json, {"flags": given.flags[1:], "jobs": report})


if __name__ == "__main__":
    main()
