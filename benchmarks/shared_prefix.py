"""Decodes that share a prefix: what reading it together gains, in a layer's attention and in whole steps. Needs a GPU.

    python -P benchmarks/shared_prefix.py [--quick] [--json FILE]
    python -P benchmarks/shared_prefix.py --engine MODEL [--batch 64] [--prefix 8192] [--own 256] [--json FILE] [engine flags]

The first times one layer, for heads of several models: `plain_us` is decode.py with its own rotation, as steps without shared prefixes
have it; `shared_us` the rotation, shared_prefix.py and decode.py; `prefix_us` shared_prefix.py alone. Caches of several layers take
turns, so that none is found in the L2 cache. Without --quick other tiles of shared_prefix.py are tried, too. The second times steps of
decodes with and without, on one engine, dummy weights; two steps are in flight.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.kernel import Columns, SharedPrefixes
from meshlm.kernels.attention.shared_prefix import shared_prefix
from meshlm.kernels.attention.tiles import (
    SHARED_PROGRAMS,
    SHARED_ROWS,
    SHARED_TILE,
    SharedSizes,
    decode_tiles,
)
from meshlm.kernels.measure import keep, microseconds
from meshlm.kernels.pdl import multiprocessors
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.engine import shared_prefixes
from meshlm.workers.engine.shared_prefixes import Clusters, PrefixTables

sys.path.insert(0, str(Path(__file__).parent))

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
PAGE, OWN = 16, 512
LONGEST = 40_960  # tokens that a row has room for
HEADS = {"Llama 8B": (32, 8, 128), "Qwen3-0.6B": (16, 8, 128), "Qwen3-30B-A3B": (32, 4, 128)}
REQUESTS, PREFIXES = (8, 32, 64, 256), (1024, 4096, 8192, 32768)
SWEPT = [(32, 8192), (256, 8192)]
CACHES = 200e6  # bytes of keys and values of all prefixes, more than an L2 cache holds


class Choice(NamedTuple):
    """Of shared_prefix.py: rows of a tile, its keys, warps, stages, and programs of a multiprocessor."""

    rows: int = SHARED_ROWS
    block_n: int = SHARED_TILE[0]
    warps: int = SHARED_TILE[1]
    stages: int = SHARED_TILE[2]
    programs: int = SHARED_PROGRAMS


TILES = [
    (64, 32, 4, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 8, 2),
    (64, 128, 4, 2),
    (128, 32, 8, 2),
    (128, 64, 8, 2),
]
TILES += [(128, 64, 8, 3), (128, 128, 8, 2)]
CHOICES = [Choice(*tile, programs) for tile in TILES for programs in (1, 2, 3, 4)]


class Case:
    """One layer's decodes of n requests that share a prefix and have OWN tokens each."""

    def __init__(self, shape: tuple[int, int, int], n: int, prefix: int, *, filled: bool) -> None:
        """filled: with numbers; else it is there to compile kernels."""
        heads, kv_heads, dim = self.shape = shape
        self.n, self.prefix, self.device = n, prefix, DEVICE
        pages, own = prefix // PAGE, -(-OWN // PAGE)
        total = pages + n * own
        order = torch.randperm(total, device=self.device).int()
        blocks = torch.cat((order[:pages].expand(n, pages), order[pages:].view(n, own)), dim=1).contiguous()
        each = torch.arange(n, dtype=torch.int32, device=self.device)
        self.at = Columns(each, torch.full_like(each, prefix + OWN - 1), each + 1, n, blocks)
        layers = max(2, min(8, round(CACHES / (4 * prefix * kv_heads * dim)))) if filled else 1
        size = (2, total, PAGE, kv_heads, dim)
        self.caches = [torch.empty(size, device=self.device, dtype=DTYPE) for _ in range(layers)]
        self.qkv = torch.randn(n, (heads + 2 * kv_heads) * dim, device=self.device).to(DTYPE)
        for cache in self.caches if filled else ():
            cache.normal_()
        self.out = torch.empty(n, heads, dim, device=self.device, dtype=DTYPE)
        angles = torch.randn(prefix + OWN, dim // 2, device=self.device)
        self.rope = Rope(torch.cat((angles.cos(), angles.sin()), dim=1), None, 1e-6, heads)
        self.positions = self.at.starts.long()
        self.slots = blocks[:, -1].long() * PAGE + PAGE - 1
        self.tiles = decode_tiles(n * kv_heads, LONGEST, self.device, heads // kv_heads, dim)

    def workspace(self, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, dim = self.shape
        places = self.n * heads * slots
        counters = torch.zeros(self.n * kv_heads, dtype=torch.int32, device=self.device)
        return torch.empty(places * dim, device=self.device), torch.empty(places * 2, device=self.device), counters

    def plain(self) -> Callable[[], None]:
        splits, block_n, warps, stages = self.tiles
        room = self.workspace(splits)

        def run() -> None:
            for keys, values in self.caches:
                decode(
                    self.qkv, keys, values, self.at, self.shape[2] ** -0.5, self.out, room, splits, rope=self.rope,
                    block_n=block_n, warps=warps, stages=stages,
                )  # fmt: skip

        return run

    def shared(self, choice: Choice, *, only_prefix: bool = False) -> Callable[[], None]:
        heads, _, dim = self.shape
        prefixes, scale = self._prefixes(choice), dim**-0.5
        splits, block_n, warps, stages = self.tiles
        room = self.workspace(prefixes.slots(splits))
        options: dict[str, Any] = {"block_n": choice.block_n, "warps": choice.warps, "stages": choice.stages}
        rotated = torch.randn_like(self.out)

        def run() -> None:
            for keys, values in self.caches:
                query = rotated
                if not only_prefix:
                    query = rope_cache(
                        self.qkv, self.positions, self.slots, self.rope.table, None, 1e-6, keys, values, heads
                    )
                shared_prefix(query, keys, values, self.at, prefixes, scale, room, splits, **options)
                if not only_prefix:
                    decode(
                        query, keys, values, self.at, scale, self.out, room, splits, shared=prefixes,
                        block_n=block_n, warps=warps, stages=stages,
                    )  # fmt: skip

        return run

    def _prefixes(self, choice: Choice) -> SharedPrefixes:
        heads, kv_heads, _ = self.shape
        pieces = -(-choice.programs * multiprocessors(self.device) // kv_heads)
        sizes = SharedSizes(choice.rows // (heads // kv_heads), pieces)
        tables = PrefixTables(0, PAGE, self.n, sizes, 1)
        clusters = Clusters(np.arange(self.n, dtype=np.int32), np.array([self.n]), np.array([self.prefix]))
        flat = torch.from_numpy(tables.packed(clusters, self.n)).to(self.device)
        items, members, tokens, parts, end = tables.offsets(self.n)
        lines = flat[items : items + 5 * sizes.num_items(self.n)].view(-1, 5)
        columns = (flat[members : members + self.n], flat[tokens : tokens + self.n], flat[parts : parts + self.n])
        assert end == len(flat)
        return SharedPrefixes(lines, *columns, tile=sizes.tile, most_parts=sizes.most_parts(self.n))

    def error(self) -> float:
        """How far both ways are from one another, in parts of the norm. The last thing that is asked: one cache is left."""
        self.qkv.normal_()
        del self.caches[1:]  # the rotation turns the step's keys in place
        self.plain()()
        expected = self.out.clone()
        self.shared(Choice())()
        return float((self.out - expected).float().norm() / expected.float().norm())

    def us(self, run: Callable[[], None]) -> float:
        """Of a layer."""
        return round(microseconds(run, 5) / len(self.caches), 1)


def compile_all(*, quick: bool) -> None:
    """What the cases launch, several at a time."""
    for shape in HEADS.values():
        for n in REQUESTS:
            case = Case(shape, n, PREFIXES[0], filled=False)
            swept = not quick and any(n == number for number, _ in SWEPT)
            for run in (case.plain(), *(case.shared(choice) for choice in [Choice(), *(CHOICES if swept else [])])):
                run()


def layers(*, quick: bool) -> Iterator[dict[str, Any]]:
    begun = time.perf_counter()
    with precompiled():
        compile_all(quick=quick)
    yield {"compiled_s": round(time.perf_counter() - begun, 1)}
    for name, shape in HEADS.items():
        for n in REQUESTS:
            for prefix in PREFIXES:
                result: dict[str, Any] = {"heads": name, "requests": n, "prefix": prefix, "own": OWN}
                try:
                    result |= measured(Case(shape, n, prefix, filled=True), sweep=not quick and (n, prefix) in SWEPT)
                except Exception as error:  # the others are measured all the same
                    result["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                yield result


def measured(case: Case, *, sweep: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"plain_us": case.us(case.plain()), "shared_us": case.us(case.shared(Choice()))}
    result["prefix_us"] = case.us(case.shared(Choice(), only_prefix=True))
    result["gain"] = round(result["plain_us"] / result["shared_us"], 2)
    found = []
    for choice in CHOICES if sweep else ():
        try:
            alone = case.us(case.shared(choice, only_prefix=True))
            found.append({**choice._asdict(), "prefix_us": alone, "shared_us": case.us(case.shared(choice))})
        except Exception as error:  # too large for this GPU, say
            found.append({**choice._asdict(), "shared_us": float("inf"), "error": str(error)[:80]})
    if found:
        result["tiles"] = sorted(found, key=lambda each: each["shared_us"])
    result["differs"] = round(case.error(), 5)
    return result


def report(results: Iterator[dict[str, Any]], path: str | None) -> None:
    """Prints a line for each, without the tiles but the best ones, and keeps all."""
    kept = []
    for result in results:
        kept.append(result)
        print(json.dumps({**result, **({"tiles": result["tiles"][:3]} if "tiles" in result else {})}), flush=True)
        keep(kept, path)  # what was measured stays, whatever happens next


# --- whole steps ---


def plan(rows: range, starts: int, counts: int, new: list[NewRow]) -> StepPlan:
    n = len(rows)
    numbers = np.array(rows, np.int32).tobytes()
    first, each = (np.full(n, value, np.int32).tobytes() for value in (starts, counts))
    return StepPlan(1, StepId(1), numbers, first, each, b"", n * counts, new_rows=new)


def steps(arguments: argparse.Namespace, extra: list[str]) -> Iterator[dict[str, Any]]:
    from engine_step import make_engine

    n, prefix, own = arguments.batch, arguments.prefix, arguments.own
    reserve = 16 * arguments.steps
    context = prefix + own
    flags = ["--max-model-len", str(context + reserve + 64), *extra]
    engine = make_engine(arguments.engine, flags)
    page = engine.facts.block_size
    shared, rest = prefix // page, -(-(own + reserve) // page)

    def row(number: int) -> NewRow:
        begin = shared + number * rest
        pages = np.concatenate((np.arange(shared), np.arange(begin, begin + rest))).astype(np.int32)
        tokens = np.arange(context, dtype=np.int32) * 7 % 30_000 + number
        sampling = SamplingParams(max_tokens=reserve, temperature=0.0, seed=number)
        return NewRow(Row(number), tokens.tobytes(), context, pages.tobytes(), sampling)

    first, chunk = [row(0)], 4096
    for start in range(0, prefix, chunk):
        engine.step(plan(range(1), start, min(chunk, prefix - start), first), 0).wait()
        first = []
    for number in range(n):
        engine.step(plan(range(number, number + 1), prefix, own, [row(number)] if number else []), 0).wait()
    position = context

    def run(count: int) -> dict[str, float]:
        nonlocal position
        pending: deque[Any] = deque()
        done, host = [], []
        begun = time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            pending.append(engine.step(plan(range(n), position, 1, []), 0))
            host.append(time.perf_counter() - before)
            position += 1
            if len(pending) == 2:
                done.append(pending.popleft().wait())
        done += [each.wait() for each in pending]
        wall = (time.perf_counter() - begun) / count
        gpu = sorted(result.gpu_ns for result in done)[count // 2] / 1e6
        host_ms = sorted(host)[count // 2] * 1e3
        return {"step_ms": round(wall * 1e3, 3), "gpu_ms": round(gpu, 3), "host_ms": round(host_ms, 3)}

    least = shared_prefixes.LEAST_SAVED
    for cascade in (True, False, True, False):
        shared_prefixes.LEAST_SAVED = 1 if cascade else 1 << 60
        if engine.rows.prefixes is not None:
            engine.rows.prefixes.look_again()
        run(24)  # a graph of its own is captured
        before = dict(engine.graphs.replays)
        found = run(arguments.steps)
        replays = {kind: count - before.get(kind, 0) for kind, count in engine.graphs.replays.items()}
        yield {"batch": n, "prefix": prefix, "own": own, "cascade": cascade, **found, "replays": replays}
    shared_prefixes.LEAST_SAVED = least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="no other tiles")
    parser.add_argument("--engine", help="whole steps of this model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--own", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json")
    arguments, extra = parser.parse_known_args()
    measure = partial(steps, arguments, extra) if arguments.engine else partial(layers, quick=arguments.quick)
    report(measure(), arguments.json)


if __name__ == "__main__":
    main()
