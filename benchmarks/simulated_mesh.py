"""The mesh of simulate.py: real coordinator and schedulers in simulated time, with modelled devices, links and detokenizers."""

import argparse
import random
import statistics
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import msgspec
from msgspec import Struct
from simulated_traffic import Job, Timing, Traffic

from meshlm.coordinator import core as coordinator
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import (
    Admit,
    CoordinatorToScheduler,
    DetokenizerToCoordinator,
    EngineRequest,
    Load,
    Readmit,
    Refused,
)
from meshlm.protocol.edges.step import Reset, StepPlan, StepResult, WorkerReady
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import COORDINATOR, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process import events
from meshlm.scheduler_proc import core as scheduler
from meshlm.scheduler_proc.limits import Limits

LIFE = Incarnation(1)
HOP_S = 60e-6  # a message from one process to another on one host
BLOCK_SIZE = 16
SAMPLE_CODEC = 64  # one of so many messages is encoded and decoded, to know what that costs


class Rank:
    """A real scheduler and a device that runs its plans one after the other."""

    def __init__(self, world: "World", number: int, num_blocks: int) -> None:
        self.world, self.identity = world, Identity(Role.SCHEDULER, number)
        self.worker = Identity(Role.WORKER, number)
        limits = Limits(max_model_len=32_768, max_num_seqs=256, max_num_batched_tokens=8192, first_worker=number)
        self.core = scheduler.Scheduler(limits)
        self.free_at = self.busy_s = 0.0
        for detokenizer in world.detokenizers:
            self.handle(events.PeerUp(detokenizer, LIFE))
        for send in self.core.handle(events.PeerUp(self.worker, LIFE), 0.0):
            if isinstance(send.message, Reset):
                ready = WorkerReady(send.message.session, num_blocks, BLOCK_SIZE, 256, 8192, 128_256)
                self.handle(events.Received(self.worker, LIFE, ready))

    def handle(self, event: events.Event) -> None:
        self.send(self.core.handle(event, self.world.now))
        self.pump()
        self.send(self.core.report())

    def send(self, sends: list[events.Send]) -> None:
        world = self.world
        for send in sends:
            message = send.message
            if type(message) is TokenDeltas:
                world.tokens(send.to, message)
            elif type(message) is Load:
                world.count("scheduler > coordinator", message)
                world.at(HOP_S, world.coordinate, events.Received(self.identity, LIFE, message))

    def pump(self) -> None:
        world, core = self.world, self.core
        while sends := core.plan(int(world.now * 1e9)):
            plan, record = sends[0].message, core.inflight[-1]
            assert isinstance(plan, StepPlan)
            starts = memoryview(plan.starts).cast("i")
            kv_tokens = sum(starts[: record.num_decode_tokens])
            duration = world.timing.step(plan.num_tokens - record.num_decode_tokens, kv_tokens)
            begun = max(world.now, self.free_at)
            self.free_at = begun + duration
            self.busy_s += duration
            num_tokens = sum(plan.samples) if plan.samples else len(plan.rows) // 4
            done_ns = int(self.free_at * 1e9)
            result = StepResult(
                plan.session, plan.step, bytes(4 * num_tokens), launched_ns=int(begun * 1e9), done_ns=done_ns
            )
            event = events.Received(self.worker, LIFE, result)
            world.at(self.free_at - world.now + HOP_S, self.handle, event)


class World:
    """Clock, links, clients; and what is measured."""

    def __init__(self, options: argparse.Namespace, num_ranks: int, routing: Any, kind: str, num_requests: int) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.timing: Timing = options.timing
        self.detokenizers = [
            Identity(Role.DETOKENIZER, i) for i in range(max(1, num_ranks // options.ranks_per_detokenizer))
        ]
        self.core = coordinator.Coordinator(10**9, num_ranks, routing)
        self.messages: Counter[str] = Counter()
        self.cpu: dict[str, float] = defaultdict(float)  # seconds, by the kind of event
        self.calls: Counter[str] = Counter()
        self.codec: dict[str, list[float]] = {}
        self.jobs: dict[int, Job] = {}
        self.work: dict[int, EngineRequest] = {}
        self.ttft: list[float] = []
        self.num_done = self.num_tokens = self.num_moved = 0
        self.outstanding: list[float] = []  # of the fullest rank, over the mean
        self._handle = 0
        self.begun, self.done_before, self.tokens_before, self.cache_before = 0.0, 0, 0, (0, 0)
        self.traffic = Traffic(kind, num_ranks, options.rate, options.output_tokens, random.Random(options.seed))
        self.left = num_requests
        for detokenizer in self.detokenizers:
            self.coordinate(
                events.Received(detokenizer, LIFE, control.Join(control.Member(detokenizer, LIFE, "", True)))
            )
        self.ranks: list[Rank] = []
        for number in range(num_ranks):
            identity = Identity(Role.SCHEDULER, number)
            self.coordinate(events.Received(identity, LIFE, control.Join(control.Member(identity, LIFE, "", True))))
            self.ranks.append(Rank(self, number, options.kv_tokens // BLOCK_SIZE))
        while self._queue:
            self._next()
        self.startup_s = sum(self.cpu.values())
        self.messages.clear()
        self.cpu.clear()
        self.calls.clear()

    def at(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heappush(self._queue, (self.now + delay, self._number, callback, arguments))

    def _next(self) -> None:
        self.now, _, callback, arguments = heappop(self._queue)
        callback(*arguments)

    def run(self) -> None:
        self.at(0.0, self.arrive)
        self.at(1.0, self.tick)
        warm = self.left // 2
        while self.left > warm:
            self._next()
        self._begin_measuring()
        while self.num_done < self.traffic.count or self.left > 0:
            self._next()

    def _begin_measuring(self) -> None:
        """Caches are filled now: half of the requests was sent."""
        self.begun, self.done_before, self.tokens_before = self.now, self.num_done, self.num_tokens
        self.cache_before = self._cache()
        for rank in self.ranks:
            rank.busy_s = 0.0
        for one in (self.messages, self.cpu, self.calls, self.codec, self.ttft, self.outstanding):
            one.clear()

    def _cache(self) -> tuple[int, int]:
        batchings = [rank.core.batching for rank in self.ranks]
        return sum(b.cache_queries for b in batchings), sum(b.cache_hits for b in batchings)

    # --- clients and detokenizers ---

    def arrive(self) -> None:
        """A new conversation, and when the next one comes."""
        if self.left <= 0:
            return
        self.send(self.traffic.job(then=self.turns(self.traffic.turns - 1)))
        self.at(self.traffic.gap(), self.arrive)

    def turns(self, left: int) -> Callable[[Job], None] | None:
        def go_on(before: Job) -> None:
            said = before.prompt + array("i", bytes(4 * before.output))
            self.at(self.traffic.dice.expovariate(1 / 5), self.send_turn, said, left - 1)

        return go_on if left else None

    def send_turn(self, said: "array[int]", left: int) -> None:
        if self.left > 0:
            self.send(self.traffic.job(said, self.turns(left)))

    def send(self, job: Job) -> None:
        job.arrived = self.now
        self.left -= 1
        self._handle += 1
        sampling = SamplingParams(max_tokens=2048, eos_token_ids=(2,))
        # The model ends it: max_tokens says nothing to the coordinator, as in real traffic. The scheduler's copy is cut to length.
        work = EngineRequest(
            RequestId(job.name), Handle(self._handle), job.prompt.tobytes(), sampling, arrival_s=self.now
        )
        self.jobs[self._handle], self.work[self._handle] = job, work
        self.admit(work)

    def admit(self, work: EngineRequest) -> None:
        sender = self.detokenizers[work.handle % len(self.detokenizers)]
        message = Admit(work)
        self.count("detokenizer > coordinator", message)
        self.at(HOP_S, self.coordinate, events.Received(sender, LIFE, message))

    def tokens(self, detokenizer: Identity, deltas: TokenDeltas) -> None:
        self.messages["scheduler > detokenizer"] += 1
        handles = memoryview(deltas.handles).cast("i")
        self.num_tokens += len(handles)
        for row in deltas.first:
            job = self.jobs[handles[row]]
            if not job.first:
                job.first = self.now
                self.ttft.append(self.now - job.arrived + 4 * HOP_S)
        for end in deltas.ended:
            job = self.jobs.pop(handles[end.row])
            del self.work[handles[end.row]]
            self.num_done += 1
            if job.then is not None:
                job.then(job)

    def readmit(self, readmit: Readmit) -> None:
        for handle in readmit.handles:
            job, work = self.jobs.pop(handle, None), self.work.pop(handle, None)
            if job is not None and work is not None:
                self.num_moved += 1
                self._handle += 1
                again = msgspec.structs.replace(work, handle=Handle(self._handle), attempt=work.attempt + 1)
                self.jobs[self._handle], self.work[self._handle] = job, again
                self.admit(again)

    # --- the coordinator ---

    def coordinate(self, event: coordinator.Event) -> None:
        kind = type(event.message).__name__ if isinstance(event, events.Received) else type(event).__name__
        begun = time.thread_time()  # what other programs take from this machine does not count
        sends = self.core.handle(event, self.now)
        self.cpu[kind] += time.thread_time() - begun
        self.calls[kind] += 1
        for send in sends:
            role = send.to.role
            if role is Role.SCHEDULER and not isinstance(send.message, control.Members):
                self.count("coordinator > scheduler", send.message)
                self.at(HOP_S, self.to_rank, send.to.index, send.message)
            elif role is Role.DETOKENIZER and not isinstance(send.message, control.Members):
                self.count("coordinator > detokenizer", send.message)
                assert not isinstance(send.message, Refused), f"refused: {send.message.message}"
                if isinstance(send.message, Readmit):
                    self.at(HOP_S, self.readmit, send.message)

    def to_rank(self, number: int, message: Struct) -> None:
        work = getattr(message, "work", None)
        if work is not None:  # where the model's end token will come
            short = msgspec.structs.replace(work.sampling, max_tokens=self.jobs[work.handle].output)
            message = msgspec.structs.replace(message, work=msgspec.structs.replace(work, sampling=short))
        self.ranks[number].handle(events.Received(COORDINATOR, LIFE, message))

    def tick(self) -> None:
        self.coordinate(events.Tick(self.now))
        outstanding = [len(rank.core.requests) for rank in self.ranks]
        if any(outstanding) and self.left > 0:  # at the end the mean goes to nothing
            self.outstanding.append(max(outstanding) / statistics.mean(outstanding))
        for rank in self.ranks:
            rank.handle(events.Tick(self.now))
        self.at(1.0, self.tick)

    def count(self, link: str, message: Struct) -> None:
        self.messages[link] += 1
        if self.messages[link] % SAMPLE_CODEC == 0 and link in _CODECS:
            self.codec.setdefault(link, []).append(_codec_s(link, message))

    # --- the result ---

    def result(self) -> dict[str, Any]:
        ttft = sorted(self.ttft)
        busy = [rank.busy_s for rank in self.ranks]
        queries, hits = (after - before for after, before in zip(self._cache(), self.cache_before, strict=True))
        handle_s = sum(self.cpu.values())
        codec_s = sum(statistics.median(times) * self.messages[link] for link, times in self.codec.items())
        num, span = max(1, self.num_done - self.done_before), self.now - self.begun
        return {
            "requests": self.num_done,
            "measured": num,
            "measured_s": round(span, 2),
            "output_tokens_per_s": round((self.num_tokens - self.tokens_before) / span),
            "hit_rate": round(hits / max(1, queries), 4),
            "ttft_ms": {f"p{p}": round(1e3 * ttft[int(len(ttft) * p / 100)], 1) for p in (50, 90, 99)},
            "balance": {
                "busy_max_over_mean": round(max(busy) / statistics.mean(busy), 3),
                "outstanding_max_over_mean": round(statistics.mean(self.outstanding), 3) if self.outstanding else None,
            },
            "gpu_busy": round(statistics.mean(busy) / span, 3),
            "moved": self.num_moved,
            "messages_per_s": {link: round(count / span, 1) for link, count in self.messages.items()},
            "coordinator": {
                "handle_us_per_request": round(1e6 * handle_s / num, 1),
                "codec_us_per_request": round(1e6 * codec_s / num, 1),
                "handle_us": {kind: round(1e6 * self.cpu[kind] / self.calls[kind], 1) for kind in self.cpu},
                "busy": round((handle_s + codec_s) / span, 4),
                "saturates_at_requests_per_s": round(num / max(1e-9, handle_s + codec_s)),
                "startup_s": round(self.startup_s, 2),
                "index_chunks": len(self.core.router.index) if self.core.router.index is not None else 0,
            },
        }


_CODECS = {
    "detokenizer > coordinator": (DetokenizerToCoordinator, "decode"),
    "scheduler > coordinator": (Load, "decode"),
    "coordinator > scheduler": (CoordinatorToScheduler, "encode"),
}
_DECODERS = {link: msgspec.msgpack.Decoder(kind) for link, (kind, _) in _CODECS.items()}
_encode = msgspec.msgpack.Encoder().encode


def _codec_s(link: str, message: Struct) -> float:
    """What the coordinator spends on a message's bytes."""
    frame = _encode(message)
    begun = time.perf_counter()
    if _CODECS[link][1] == "decode":
        _DECODERS[link].decode(frame)
    else:
        _encode(message)
    return time.perf_counter() - begun
