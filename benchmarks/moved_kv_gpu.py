"""What moved KV gives on GPUs, in the shapes of Llama 3.1 8B with random weights.

    python -P benchmarks/moved_kv_gpu.py [--parts copies without with] [--json FILE]     one GPU, 64 GiB of the host's memory: 6 minutes
    python -P benchmarks/moved_kv_gpu.py --parts copies roles [--json FILE]              two GPUs: 4 minutes

copies: bytes a second, without a mesh. without, with: a mesh without a store and one with it, which do the same: agents that come back,
prompts that were evicted, 32 streams beside such prompts and beside new ones. roles: two ranks that do both beside --dp-roles.
A part that fails, or takes longer than its limit, is written down as such, and the next one begins.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
import shapes
from harness import KeptStream, Mesh
from moved_kv import agents_tok_s, blocks, first_tokens_s, prompt, stream

from meshlm.runtime.process import host_memory

POOL = 61_440  # tokens of the device's KV cache: 7.5 GiB
STORE_GIB = 56.0  # at most; else four fifths of what the host has left
STREAMS, BATCH = 32, 8192
Report = dict[str, Any]


def model(into: Path) -> str:
    """A folder with the configuration and a tokenizer of as many words."""
    from tokenizers import Tokenizer, decoders, models

    folder = into / "llama3-8b"
    folder.mkdir()
    config = shapes.config_of(folder.name)
    (folder / "config.json").write_text(json.dumps(config))
    made: Any = Tokenizer(models.WordLevel({f" w{nth}": nth for nth in range(config["vocab_size"])}, unk_token=" w0"))
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


# --- parts of a mesh ---


def gaps_ms(streams: list[KeptStream]) -> dict[str, float] | None:
    gaps = [after - before for one in streams for before, after in zip(one.times, one.times[1:], strict=False)]
    return harness.milliseconds(gaps)


async def evicted(mesh: Mesh, given: argparse.Namespace, tokens: int, count: int) -> Report:
    """Prompts for which the device has no room together: computed, and, with a store, found there."""
    random = Random(tokens)
    prompts = [prompt(random, tokens) for _ in range(count)]
    await first_tokens_s(mesh, [prompt(random, tokens)])  # whatever is captured or loaded once
    computed = await first_tokens_s(mesh, prompts)
    await asyncio.sleep(1.0)  # saved
    again = await first_tokens_s(mesh, prompts)
    found = {"first_ms": harness.milliseconds(computed), "again_ms": harness.milliseconds(again)}
    return found | {"times": round(statistics.median(computed) / statistics.median(again), 2)}


async def beside(mesh: Mesh, prompts: list[list[int]], every_s: float) -> Report:
    """Streams that decode while these prompts come, one after the other."""
    random = Random(9)
    count = 100 + int(len(prompts) * every_s * 120)
    decoding = [asyncio.ensure_future(stream(mesh.port, prompt(random, 64), count)) for _ in range(STREAMS)]
    await asyncio.sleep(0.5)
    others = []
    for one in prompts:
        others.append(asyncio.ensure_future(stream(mesh.port, one, 2)))
        await asyncio.sleep(every_s)
    waited = await asyncio.gather(*others)
    ttft = harness.milliseconds([one.times[0] - one.begun for one in waited])
    return {"itl_ms": gaps_ms(await asyncio.gather(*decoding)), "ttft_ms": ttft}


async def alone(mesh: Mesh, given: argparse.Namespace) -> Report:
    return {
        "itl_ms": gaps_ms(
            await asyncio.gather(*(stream(mesh.port, prompt(Random(n), 64), 400) for n in range(STREAMS)))
        )
    }


async def beside_new(mesh: Mesh, given: argparse.Namespace) -> Report:
    """With a store: saves of 1 GiB each."""
    random = Random(4)
    return await beside(mesh, [prompt(random, given.tokens) for _ in range(8)], 0.5)


async def beside_known(mesh: Mesh, given: argparse.Namespace) -> Report:
    """Two prompts again and again that the device has: what their last tokens cost the streams, and no copies."""
    random = Random(5)
    prompts = [prompt(random, given.tokens) for _ in range(2)]
    await first_tokens_s(mesh, prompts)
    return await beside(mesh, prompts * 8, 0.25)


async def beside_evicted(mesh: Mesh, given: argparse.Namespace) -> Report:
    """As many that the device has not, each asked once: with a store loads of 1 GiB each."""
    random = Random(6)
    prompts = [prompt(random, given.tokens) for _ in range(16)]
    await first_tokens_s(mesh, prompts)
    await asyncio.sleep(1.0)
    return await beside(mesh, prompts, 0.25)


async def agents(mesh: Mesh, given: argparse.Namespace) -> Report:
    """Users whose contexts together take four times what the device holds."""
    own = argparse.Namespace(users=20, turns=6, tokens=12_288, answer=32)
    return {
        "users": own.users,
        "turns": own.turns,
        "context": own.tokens,
        "tok_s": round(await agents_tok_s(mesh, own), 1),
    }


async def bursts(mesh: Mesh, given: argparse.Namespace) -> Report:
    """Streams that decode while bursts of prompts come, which get 256 tokens each."""
    random, begun = Random(3), time.perf_counter()
    decoding = [asyncio.ensure_future(stream(mesh.port, prompt(random, 64), 1200)) for _ in range(STREAMS)]
    await asyncio.sleep(1.0)
    others = []
    for _ in range(5):
        others += [asyncio.ensure_future(stream(mesh.port, prompt(random, given.tokens), 256)) for _ in range(4)]
        await asyncio.sleep(2.0)
    streams, long = await asyncio.gather(*decoding), await asyncio.gather(*others)
    seconds = time.perf_counter() - begun
    ttft = harness.milliseconds([one.times[0] - one.begun for one in long])
    tokens = sum(len(one.times) for one in (*streams, *long))
    return {"itl_ms": gaps_ms([*streams, *long]), "ttft_ms": ttft, "tok_s": round(tokens / seconds, 1)}


def moved(mesh: Mesh) -> dict[str, float]:
    """What /metrics says of loads, saves and hits."""
    with urllib.request.urlopen(f"http://127.0.0.1:{mesh.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    names = "kv_loads|kv_loaded|kv_saved|kv_offload_total|kv_store_hits|kv_store_evicted|external_prefix|request_hand"
    series = re.findall(rf"^meshlm:((?:{names})\w*\{{.*\}}) (\S+)$", text, re.M)
    return {re.sub(r'model_name="[^"]*",?', "", name): float(value) for name, value in series if float(value)}


Job = Callable[[Mesh, argparse.Namespace], Awaitable[Report]]
JOBS: dict[str, tuple[Job, float]] = {  # with the seconds that each may take
    "agents": (agents, 90.0),
    "evicted": (lambda mesh, given: evicted(mesh, given, given.tokens, 10), 30.0),
    "evicted_long": (lambda mesh, given: evicted(mesh, given, 4 * given.tokens, 3), 40.0),
    "alone": (alone, 20.0),
    "beside_known": (beside_known, 30.0),
    "beside_evicted": (beside_evicted, 40.0),
    "beside_new": (beside_new, 30.0),
    "bursts": (bursts, 60.0),
}


def of_mesh(given: argparse.Namespace, flags: list[str], jobs: list[str], keep: Callable[[Report], None]) -> None:
    """All of these jobs in one mesh; `keep` gets what is known after each."""
    found: Report = {"flags": flags}
    with Mesh([*given.flags, *flags]) as mesh:
        found["ready_s"] = round(mesh.ready_s, 1)
        for name in jobs:
            job, limit_s = JOBS[name]
            try:
                found[name] = asyncio.run(asyncio.wait_for(job(mesh, given), limit_s))
            except (Exception, SystemExit) as error:  # the other jobs' figures are not lost with it
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
            print(name, json.dumps(found[name]), flush=True)
            keep(found)
        found["metrics"] = moved(mesh)
        found["warnings"] = [line[:300] for line in mesh.lines if "warning" in line or "error" in line][-10:]
        keep(found)


# --- copies, without a mesh ---


def page_columns(count: int) -> list[Any]:
    import torch

    return list(torch.randint(256, (64, count, 32768), dtype=torch.uint8, device="cuda"))


def export() -> None:
    """The pages of 8,192 tokens on GPU 0, until standard input ends."""
    import msgspec

    from meshlm.workers.kv.device_pages import DevicePages

    pages = DevicePages(page_columns(512), shared=True)
    print(msgspec.json.encode(pages.memory).decode(), flush=True)
    sys.stdin.read()


def copies() -> Report:
    """GB/s of 8,192 tokens' pages, 1 GiB, medians of seven: saved, loaded, both side by side (half of them each), beside copies of
    pinned memory; from another process."""
    import msgspec
    import torch

    from meshlm.protocol.edges.kv import PageMemory, Segment
    from meshlm.workers.kv.device_pages import DevicePages
    from meshlm.workers.kv.mover import Copied, Copy, Mover
    from meshlm.workers.kv.pages import SharedBytes

    torch.cuda.set_device(torch.cuda.device_count() - 1)  # the exporting process is on the first
    pages = DevicePages(page_columns(2048))
    count, page, random = 512, pages.page_bytes, Random(0)
    shared, mover, done = SharedBytes(count * page), Mover(pages, print), threading.Event()
    store = PageMemory(shared.path, count, (Segment(0, page, page),))
    found: Report = {"page_bytes": page, "pages": count, "gpu": torch.cuda.get_device_name()}

    def gb_s(other: PageMemory, lines: list[int], *, is_load: bool) -> float:
        said: list[Copied] = []

        def take(copied: Copied) -> None:
            said.append(copied)
            done.set()

        done.clear()
        mover.submit(Copy(0, is_load, random.sample(range(2048), count), lines, other, None, 0, take))
        if not done.wait(60) or said[0].num_pages != count:
            raise SystemExit(f"a copy failed: {said}")
        return count * page / said[0].duration_ns

    def median(other: PageMemory, lines: list[int], *, is_load: bool) -> float:
        return round(statistics.median(gb_s(other, lines, is_load=is_load) for _ in range(7)), 1)

    def both_ways() -> float:
        said = SimpleQueue[Copied]()
        here, half, begun = random.sample(range(2048), count), count // 2, time.perf_counter()
        for is_load, places in ((True, range(half)), (False, range(half, count))):
            mover.submit(Copy(0, is_load, [here[place] for place in places], places, store, None, 0, said.put))
        if any(said.get(timeout=60).num_pages != half for _ in range(2)):
            raise SystemExit("a copy failed")
        return count * page / (time.perf_counter() - begun) / 1e9

    in_order, anyhow = list(range(count)), random.sample(range(count), count)
    found["first_save"] = round(gb_s(store, in_order, is_load=False), 1)  # pins the memory
    for name, lines in (("in_order", in_order), ("anyhow", anyhow)):
        found[f"save_{name}"] = median(store, lines, is_load=False)
        found[f"load_{name}"] = median(store, lines, is_load=True)
    found["both_ways"] = round(statistics.median(both_ways() for _ in range(7)), 1)
    host, device = (
        torch.empty(count * page, dtype=torch.uint8, pin_memory=True),
        torch.empty(count * page, dtype=torch.uint8, device="cuda"),
    )
    for name, to, from_ in (("pinned_to_host", host, device), ("pinned_to_device", device, host)):
        seconds = []
        for _ in range(7):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            to.copy_(from_, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        found[name] = round(count * page / statistics.median(seconds) / 1e9, 1)
    command = [sys.executable, "-P", __file__, "--export"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        peer = msgspec.json.decode(process.stdout.readline(), type=PageMemory)
        gb_s(peer, in_order, is_load=True)
        found["from_peer" if torch.cuda.device_count() > 1 else "from_process_of_same_gpu"] = median(
            peer, anyhow, is_load=True
        )
        process.kill()
    return found


def copies_apart() -> Report:
    """In a process of its own, which gives the GPU back."""
    command = [sys.executable, "-P", __file__, "--only-copies"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


WITHOUT = ["agents", "evicted", "alone", "beside_known", "beside_evicted", "beside_new"]
WITH = ["agents", "evicted", "evicted_long", "alone", "beside_known", "beside_evicted", "beside_new"]
PARTS: dict[str, list[tuple[str, list[str], list[str]]]] = {  # meshes: a name, flags, jobs
    "without": [("without", [], WITHOUT)],
    "with": [("with", [], WITH)],
    "roles": [
        ("mixed", ["-dp", "2"], ["bursts"]),
        ("apart", ["-dp", "2", "--dp-roles", "prefill:1,decode:1"], ["bursts"]),
    ],
}


def measure(given: argparse.Namespace, rest: list[str]) -> None:
    """All parts, one after the other. rest: flags of all meshes."""
    harness.START_LIMIT_S = 150.0
    report: Report = {}
    with tempfile.TemporaryDirectory() as folder:
        given.flags = [model(Path(folder)), "--device", "cuda", "--load-format", "dummy", "--max-model-len", "40960"]
        given.flags += ["--max-num-batched-tokens", str(BATCH), *rest]

        def keep(name: str, found: Report) -> None:
            report[name] = found
            harness.keep(given.json, {"flags": given.flags[1:], "parts": report})

        for part in given.parts:
            if part == "copies":
                keep(part, copies_apart())
                print(part, json.dumps(report[part]), flush=True)
                continue
            for name, flags, jobs in PARTS[part]:
                pool = [] if part == "roles" else blocks(POOL)
                if part == "with":
                    pool += ["--kv-offloading-size", f"{min(STORE_GIB, 0.8 * host_memory.available() / 2**30):.1f}"]
                jobs = [job for job in jobs if not given.jobs or job in given.jobs]
                try:
                    of_mesh(given, [*pool, *flags], jobs, partial(keep, name))
                except (Exception, SystemExit) as error:  # as above
                    keep(f"{name}_failed", {"failed": f"{type(error).__name__}: {error}"[-3000:]})
                    print(name, str(error)[-3000:], flush=True)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=["copies", *PARTS], default=["copies", "with", "without"])
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=[], help="of the parts; else all")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--export", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only-copies", action="store_true", help=argparse.SUPPRESS)
    given, rest = parser.parse_known_args()
    if given.export:
        export()
    elif given.only_copies:
        print(json.dumps(copies()))
    else:
        measure(given, rest)


if __name__ == "__main__":
    main()
