"""Steps of data-parallel ranks that share experts: by backend and by tokens a rank, with dual batch overlap and without, on GPUs.

    python -P benchmarks/expert_parallel.py MODEL [--tokens 32 128 ...] [--backends ...] [--skew 4] [--json FILE]

The engine alone, a process a GPU, no mesh; dummy weights, bfloat16; two steps are in flight. Prompts are of 1,024 tokens at most;
decodes have a context of 96. `ms` is the wall time of a step without halves and with (the median of the turns, which alternate),
`communication` the part of a whole step in which rank 0's GPU sends, or waits for what others send.
--skew: routers prefer the experts of rank 0 by such a factor; then experts move (--enable-eplb), and the same steps are measured again.
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.lockstep import StepGroup
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Epoch, Row, StepId
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.distributed.lockstep import SocketExchange
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.graphs.keys import MAX_DECODES, Key

TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BACKENDS = ("allgather_reducescatter", "all_to_all", "peer_memory")
LONGEST, CONTEXT, BLOCKS = 1024, 96, 10  # tokens of a prompt; of a decode's context, and its blocks
REQUESTS = 72  # of graphs of prompts
GRAPHS_UP_TO = 8192  # tokens of prompts: as the mesh has them of this model
TURNS, DECODES, PROMPTS = 3, 6, 4  # turns of each kind, and steps of a turn
COMMUNICATION = ("nccl", "_send", "_give_back", "_signal", "_wait", "_add", "PtoP", "Peer")
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def engine_of(arguments: argparse.Namespace, rank: int, run_dir: str) -> ModelEngine:
    """With graphs of the sizes that are measured alone, whole and in halves."""
    most = max(arguments.tokens)
    values: dict[str, object] = {
        "model": arguments.model,
        "device": "cuda",
        "load_format": "dummy",
        "dtype": "bfloat16",
    }
    values |= {
        "max_model_len": 4096,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(most, 4096),
        "run_dir": run_dir,
    }
    values |= {"data_parallel_size": arguments.ranks, "enable_expert_parallel": True, "kv_cache_memory": 24 << 30}
    values |= {"all2all_backend": "peer_memory", "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
    if arguments.skew:
        redundant = {"num_redundant_experts": arguments.redundant, "step_interval": 1 << 30}
        values |= {"enable_eplb": True, "eplb_config": json.dumps(redundant)}
    else:
        values["enable_dbo"] = True
    config = resolve.resolve(flags.build(values, None))
    engine = make_engine(config, lambda *progress: None, WorkerPlacement.of(config, rank, Membership()))
    keys = [Key(tokens, tokens) for tokens in arguments.tokens if tokens <= arguments.most_decodes]
    keys += [Key(tokens, REQUESTS) for tokens in arguments.tokens if 128 <= tokens <= GRAPHS_UP_TO]
    engine.graphs._wanted = sorted(keys if arguments.skew else keys + [key._replace(halves=True) for key in keys])
    return engine


class Steps:
    """A rank's steps: all ranks ask for the same ones at the same time."""

    def __init__(self, engine: ModelEngine, rank: int) -> None:
        self.engine, self._position = engine, CONTEXT
        self._dice = np.random.default_rng(rank)

    def _new(self, row: int, length: int, blocks: int) -> NewRow:
        """Rows of decodes beyond 1,024 share blocks with others."""
        own = np.arange(blocks, dtype=np.int32) + row % 1024 * blocks
        ids = self._dice.integers(100, 100_000, length, dtype=np.int32)
        return NewRow(Row(row), ids.tobytes(), length, own.tobytes(), GREEDY)

    def prompts(self, tokens: int) -> StepPlan:
        length = min(tokens, LONGEST)
        news = [self._new(row, length, LONGEST // 16) for row in range(tokens // length)]
        n = len(news)
        columns = np.arange(n, dtype=np.int32).tobytes(), bytes(4 * n), np.full(n, length, np.int32).tobytes()
        return StepPlan(1, StepId(1), *columns, b"", tokens, new_rows=news)

    def fill(self, requests: int) -> None:
        """Contexts of so many rows that decode."""
        for first in range(0, requests, 32):
            rows = range(first, min(requests, first + 32))
            n, news = len(rows), [self._new(row, CONTEXT + 1, BLOCKS) for row in rows]
            columns = np.array(rows, np.int32).tobytes(), bytes(4 * n), np.full(n, CONTEXT, np.int32).tobytes()
            self.engine.step(StepPlan(1, StepId(1), *columns, bytes(n), n * CONTEXT, new_rows=news), 0).wait()
        self._position = CONTEXT

    def decodes(self, requests: int) -> StepPlan:
        self._position = CONTEXT + (self._position + 1 - CONTEXT) % 60
        columns = np.arange(requests, dtype=np.int32).tobytes(), np.full(requests, self._position, np.int32).tobytes()
        return StepPlan(1, StepId(2), *columns, b"", b"", requests)

    def run(self, plans: Callable[[int], StepPlan], tokens: int, count: int) -> float:
        """Milliseconds a step."""
        pending: deque[Any] = deque()
        begun = time.perf_counter()
        for _ in range(count):
            pending.append(self.engine.step(plans(tokens), 0))
            if len(pending) == 2:
                pending.popleft().wait()
        while pending:
            pending.popleft().wait()
        return (time.perf_counter() - begun) / count * 1e3

    def halve(self, yes: bool) -> None:
        assert self.engine.together is not None
        self.engine.together._config = msgspec.structs.replace(self.engine.config.experts, enable_dbo=yes)

    def measure(self, kind: str, tokens: int, *, halves: bool = True) -> dict[str, Any]:
        plans, count = (self.decodes, DECODES) if kind == "decode" else (self.prompts, PROMPTS)
        found: dict[bool, list[float]] = {False: [], True: []}
        for on in [False, True][: 1 + halves]:
            self.halve(on)
            self.run(plans, tokens, 2)
        for _ in range(TURNS):
            for on in [False, True][: 1 + halves]:
                self.halve(on)
                self.run(plans, tokens, 1)
                found[on].append(self.run(plans, tokens, count))
        line: dict[str, Any] = {"kind": kind, "tokens": tokens, "ms": round(statistics.median(found[False]), 3)}
        line["spread"] = round(max(found[False]) / min(found[False]) - 1, 3)
        if halves:
            line["halves_ms"] = round(statistics.median(found[True]), 3)
            line["speedup"] = round(statistics.median(found[False]) / statistics.median(found[True]), 3)
        return line

    def kernels(self, kind: str, tokens: int, *, halves: bool) -> dict[str, Any]:
        """Where one step's time goes."""
        self.halve(halves)
        plans = self.decodes if kind == "decode" else self.prompts
        self.run(plans, tokens, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run(plans, tokens, 1)
            torch.cuda.synchronize()
        raw = [event for event in profile.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
        events = [(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3) for e in raw]
        by_kernel: dict[str, list[float]] = {}
        for name, _, us in events:
            by_kernel.setdefault(name[:60], []).append(us)
        longest = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:16]
        span = max(at + us for _, at, us in events) - min(at for _, at, _ in events)
        sent = union([(at, at + us) for name, at, us in events if any(word in name for word in COMMUNICATION)])
        line: dict[str, Any] = {"kind": kind, "tokens": tokens, "halves": halves, "step_us": round(span)}
        line |= {"communication_us": round(sent), "communication": round(sent / span, 3), "kernels": len(events)}
        line["longest"] = {name: f"{sum(us):.0f} us, {len(us)} times" for name, us in longest}
        return line


def union(spans: list[tuple[float, float]]) -> float:
    """The time in which any of them is."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def use(engine: ModelEngine, backend: str) -> None:
    assert engine.together is not None
    engine.model.share_experts(engine.together.experts, backend, slots=engine.balancer is not None)


def by_backend(engine: ModelEngine, arguments: argparse.Namespace, rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": [], "profiles": [], "join_s": {}}
    steps, epoch = Steps(engine, rank), 0
    for backend in arguments.backends:
        use(engine, backend)
        engine.reset()
        epoch, begun = epoch + 1, time.perf_counter()
        engine.join(SocketExchange(folder, StepGroup(Epoch(epoch), arguments.ranks), rank))
        found["join_s"][backend] = round(time.perf_counter() - begun, 2)
        for kind in ("prefill", "decode"):
            if kind == "decode":
                steps.fill(min(max(arguments.tokens), 1024))
            for tokens in arguments.tokens:
                if kind == "prefill" or tokens <= arguments.most_decodes:
                    if kind == "decode" and tokens > 1024:
                        steps.fill(tokens)
                    line = {"backend": backend, **steps.measure(kind, tokens)}
                    found["steps"].append(line)
                    if rank == 0:
                        print(json.dumps(line), flush=True)
            for tokens in [int(one.partition(":")[2]) for one in arguments.profiled if one.startswith(kind)]:
                for halves in (False, True):
                    line = {"backend": backend, **steps.kernels(kind, tokens, halves=halves)}
                    found["profiles"].append(line)
                    if rank == 0:
                        print(json.dumps(line), flush=True)
    return found


def skewed(engine: ModelEngine, arguments: argparse.Namespace, rank: int, folder: str) -> dict[str, Any]:
    """Routers that prefer some experts; then experts move."""
    for mixture in engine.model.mixtures():
        first = mixture.moe.num_experts // arguments.ranks
        mixture.router.weight[:first] *= arguments.skew  # larger logits of both signs: more of the largest ones
    use(engine, arguments.backends[0])
    engine.join(SocketExchange(folder, StepGroup(Epoch(1), arguments.ranks), rank))
    steps = Steps(engine, rank)
    found: dict[str, Any] = {"backend": arguments.backends[0], "skew": arguments.skew, "redundant": arguments.redundant}

    def all_sizes() -> list[dict[str, Any]]:
        lines = [steps.measure("prefill", tokens, halves=False) for tokens in arguments.tokens]
        steps.fill(min(max(arguments.tokens), 1024))
        return lines + [
            steps.measure("decode", tokens, halves=False)
            for tokens in arguments.tokens
            if tokens <= arguments.most_decodes
        ]

    found["before"] = all_sizes()
    assert engine.balancer is not None
    captured, moves = dict(engine.graphs.misses), []
    for _ in range(2):
        engine.rebalance()
        begun = time.perf_counter()
        steps.run(steps.decodes, min(arguments.tokens), 1)
        moves.append(round(time.perf_counter() - begun, 4))
    held = [sum(a != b for a, b in zip(slots, engine.balancer._first, strict=True)) for slots in engine.balancer.slots]
    found |= {"step_that_moves_s": moves[0], "step_that_moves_again_s": moves[1], "slots_changed": sum(held)}
    found |= {"of": sum(map(len, engine.balancer.slots)), "captured_anew": dict(engine.graphs.misses) != captured}
    found["after"] = all_sizes()
    return found


def one_rank(arguments: argparse.Namespace, rank: int, folder: str, answers: Any) -> None:
    torch.cuda.set_device(rank)
    begun = time.perf_counter()
    engine = engine_of(arguments, rank, folder)
    start_s = round(time.perf_counter() - begun, 1)
    with torch.inference_mode():
        found = (skewed if arguments.skew else by_backend)(engine, arguments, rank, folder)
    answers.put((rank, {"start_s": start_s, **found}))
    answers.close()
    answers.join_thread()
    os._exit(0)  # communicators need not be taken down in order


def first_of(answers: Any, ranks: list[Any], limit_s: float) -> Any:
    """What one rank answers. SystemExit when one has failed, or after so many seconds."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            return answers.get(timeout=0.5)
        except queue.Empty:
            if any(process.exitcode for process in ranks):
                break
    raise SystemExit("a rank failed, or took too long")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--profiled", nargs="*", default=["prefill:1024", "prefill:4096", "decode:128"])
    parser.add_argument("--most-decodes", type=int, default=MAX_DECODES, help="of a rank: as many as have CUDA graphs")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--redundant", type=int, default=16)
    parser.add_argument("--limit-s", type=float, default=240.0)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    report: dict[str, Any] = {"model": Path(arguments.model).name, "ranks": arguments.ranks}
    with tempfile.TemporaryDirectory(prefix="mlm") as folder:
        ranks = [context.Process(target=one_rank, args=(arguments, n, folder, answers)) for n in range(arguments.ranks)]
        for process in ranks:
            process.start()
        try:
            found = dict(first_of(answers, ranks, arguments.limit_s) for _ in ranks)
        finally:
            for process in ranks:
                process.kill()
    report |= found[0]
    harness.keep(arguments.json, report)
    print(json.dumps({name: value for name, value in report.items() if name not in ("steps", "profiles")}))


if __name__ == "__main__":
    main()
