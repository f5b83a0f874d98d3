"""A scheduler with a model that proves its KV: slots hold what was really computed into them. The tests of this folder share it."""

from collections import deque
from typing import Any

from msgspec import Struct
from rolling_hash import extend, generate, vector_of

from meshlm.protocol.edges.admit import Assign, EngineRequest, Load
from meshlm.protocol.edges.step import NO_LIMIT, Reset, StepPlan, StepResult, WorkerReady
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.extras import find_extra
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.limits import Limits
from meshlm.workers.kv.mirror import PrefixCacheMirror

DETOKENIZER, WORKER = Identity(Role.DETOKENIZER), Identity(Role.WORKER)
OTHER = Identity(Role.DETOKENIZER, 1)
COORDINATOR = Identity(Role.COORDINATOR)
LIFE = Incarnation(1)
VOCAB = 997


def next_token(state: int) -> int:
    return state % VOCAB


def salt_of(weights: WeightsVersion) -> int:
    return 10_000 * weights.number


def reference(prompt: list[int], num_tokens: int, stop: int = -1) -> list[int]:
    return generate(prompt, num_tokens, next_token, stop)


class Model:
    """Slots hold a rolling hash made from what the slot before really holds. With `max_drafts` it gives rows 0, 1 or more tokens."""

    def __init__(self, num_blocks: int, block_size: int, pipeline: bool = False, max_drafts: int = 0) -> None:
        self.block_size, self.num_blocks, self.pipeline, self.max_drafts = block_size, num_blocks, pipeline, max_drafts
        self.given: list[int] = []  # how many tokens rows got ...
        self.drafted: list[int] = []  # ... and how many were drafted for them
        self.pools: dict[
            int, tuple[Pool, int, list[int]]
        ] = {}  # row -> task, length of the prompt, states computed so far
        self.kv_specs: tuple[KVSpec, ...] = ()
        self.max_draft_lines = NO_LIMIT
        self.salt = 0  # of its weights: what they add to each token
        self.slots = [0] * (num_blocks * block_size)
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # tokens, blocks

    def reset(self) -> None:
        """Forget all rows."""
        self.rows.clear()

    def fresh(self) -> "Model":
        """Another life of it."""
        return Model(self.num_blocks, self.block_size, self.pipeline, self.max_drafts)

    def slot(self, row: int, position: int) -> int:
        return self.rows[row][1][position // self.block_size] * self.block_size + position % self.block_size

    def run(self, plan: StepPlan) -> StepResult:
        for row in ints(plan.removed_rows):
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row given away twice"
            self.rows[new.row] = (ints(new.token_ids), ints(new.block_ids))
            self.pools.pop(new.row, None)
            if (pool := find_extra(new.extras, Pool)) is not None:
                self.pools[new.row] = (pool, new.num_prompt_tokens, [])
        for row, block in zip(ints(plan.block_rows), ints(plan.block_ids), strict=True):
            self.rows[row][1].append(block)
        rows, starts = ints(plan.rows), ints(plan.starts)
        counts = ints(plan.counts) or [1] * len(rows)
        samples = plan.samples or b"\x01" * len(rows)
        num_drafts = ints(plan.num_drafts) or [0] * len(rows)
        assert sum(counts) + sum(num_drafts) == plan.num_tokens
        assert max(num_drafts, default=0) <= self.max_drafts
        for place, (row, start, count, sampled) in enumerate(zip(rows, starts, counts, samples, strict=True)):
            if sampled:  # drafts may have been refused since the plan was made
                starts[place] = len(self.rows[row][0]) - count
                assert starts[place] == start or (starts[place] < start and self.max_drafts and not self.pipeline)
            assert start + count + num_drafts[place] <= len(self.rows[row][1]) * self.block_size, "drafts have no block"
        assert counts == sorted(counts, key=lambda count: count != 1), "decodes come first"
        inputs = ints(plan.input_ids)
        assert inputs == [self.rows[row][0][start] for row, start in zip(rows[: len(inputs)], starts)]
        if self.pipeline:  # the first stage knows no token that the last one sampled
            assert len(inputs) == sum(
                count == 1 and bool(sampled) for count, sampled in zip(counts, samples, strict=True)
            )
        tokens: list[int] = []
        # A layer writes all keys before it reads any, so a prefix may be shared within one step: by position it is in order.
        for start, row, count in sorted(zip(starts, rows, counts, strict=True)):
            for position in range(start, start + count):
                before = self.slots[self.slot(row, position - 1)] if position else 0
                self.slots[self.slot(row, position)] = extend(before, self.rows[row][0][position] + self.salt)
        pooled = {}
        for place, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            if row in self.pools:
                task, num_prompt, states = self.pools[row]
                assert not samples[place], "a Pool never samples"
                states += [self.slots[self.slot(row, position)] for position in range(start, start + count)]
                if start + count == num_prompt:
                    pooled[place] = vector_of(states, task.kind)
        given: list[int] = []
        drafted: list[int] = []
        for row, drafts, sampled in zip(rows, num_drafts, samples, strict=True):
            if sampled:
                dice = (plan.step * 2_654_435_761 + row * 40_503) >> 5
                drafts -= bool(drafts) and dice % 5 == 0  # fewer than it may
                drafted.append(drafts)
                given.append(min(dice % 6, 1 + drafts) if plan.num_drafts else 1)
                self._sample(row, given[-1], drafts)
                tokens += self.rows[row][0][len(self.rows[row][0]) - given[-1] :]
        self.given += given
        lengths = pack_i32(given) if given != [1] * len(given) else b""
        told = pack_i32(drafted) if plan.num_drafts else b""
        self.drafted += drafted
        return StepResult(
            plan.session, plan.step, pack_i32(tokens), done_ns=1, pooled=pooled, counts=lengths, drafted=told
        )

    def _sample(self, row: int, count: int, drafts: int) -> None:
        """Append `count` tokens, the later ones drafts that prove right; drafts that prove wrong spoil the slots behind."""
        tokens = self.rows[row][0]
        last = len(tokens) - 1
        for position in range(last, last + 1 + drafts):
            before = self.slots[self.slot(row, position - 1)] if position else 0
            if position > last:  # the others are computed
                drafted = tokens[position] if position < len(tokens) else 0
                self.slots[self.slot(row, position)] = extend(before, drafted + self.salt)
            if position - last < count:
                tokens.append(next_token(self.slots[self.slot(row, position)]))


class Bench:
    """A scheduler, a model, and what came out."""

    pool_kinds = tuple(PoolKind)

    def __init__(
        self, limits: Limits, num_blocks: int, block_size: int, max_drafts: int = 0, model: Model | None = None
    ) -> None:
        self.limits = limits
        self.core = Scheduler(limits)
        self.model = model or Model(num_blocks, block_size, limits.num_stages > 1, max_drafts)
        self.directory = PrefixCacheMirror()
        self.plans: deque[StepPlan] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.pooled: dict[int, bytes] = {}
        self.refused: dict[int, str] = {}
        self.error_kinds: dict[int, ErrorKind] = {}
        self.cached: dict[int, int] = {}
        self.drafts: dict[int, bytes] = {}
        self.returned: set[int] = set()
        self.told: list[Struct] = []  # to the coordinator
        self.weights, self.cannot_have = WeightsVersion(), ""  # of its worker, and why it can have no others
        self.labels: dict[int, list[tuple[int, str]]] = {}  # from which token on, which weights
        self.num_crashes: dict[int, int] = {}  # of those
        self.started: dict[str, int] = {}
        self.ended_ids: list[str] = []
        self.now = 0.0
        self.take(self.core.handle(PeerUp(DETOKENIZER, LIFE), self.now))
        self.take(self.core.handle(PeerUp(WORKER, LIFE), self.now))

    def take(self, sends: list[Send]) -> None:
        for send in sends:
            if send.to == COORDINATOR:
                self.told.append(send.message)
            match send.message:
                case Reset() as reset:
                    while self.plans:  # a worker does all that it was sent
                        self.model.run(self.plans.popleft())
                    self.model.reset()
                    if reset.weights is not None and not self.cannot_have:
                        self.weights = reset.weights
                        self.model.salt = salt_of(self.weights)
                    facts = (self.model.num_blocks, self.model.block_size, 64, 64, VOCAB, *self.directory.columns())
                    ready = WorkerReady(
                        reset.session,
                        *facts,
                        max_drafts=self.model.max_drafts,
                        max_draft_lines=self.model.max_draft_lines,
                        pool_kinds=self.pool_kinds,
                        pooled_bytes=8,
                        attention_wave=528,
                        kv_specs=self.model.kv_specs,
                        weights=self.weights,
                        behind=self.cannot_have,
                    )
                    self.event(Received(WORKER, LIFE, ready))
                case StepPlan() as plan:
                    self.directory.apply(plan)
                    self.plans.append(plan)
                case TokenDeltas() as deltas:
                    self._deltas(deltas)
                case Load() as load:
                    self.returned.update(one.handle for one in load.returned)
                    self.num_crashes.update((one.handle, one.num_crashes) for one in load.returned)
                    self.started.update((one.request_id, one.num_cached) for one in load.started)
                    self.ended_ids += load.ended

    def _deltas(self, deltas: TokenDeltas) -> None:
        handles, starts, tokens = ints(deltas.handles), ints(deltas.starts), ints(deltas.token_ids)
        counts = ints(deltas.counts) or [1] * len(handles)
        for row, drafts in deltas.drafts.items():
            self.drafts[handles[row]] = self.drafts.get(handles[row], b"") + drafts
        at = 0
        for row, (handle, start, count) in enumerate(zip(handles, starts, counts, strict=True)):
            assert handle not in self.ended, "news after the end"
            mine = self.tokens.setdefault(handle, [])
            assert start == len(mine), "a token lost or repeated"
            mine += tokens[at : at + count]
            at += count
            if row in deltas.first:
                self.cached[handle] = deltas.first[row].num_cached_tokens
                self.labels.setdefault(handle, []).append((start, deltas.first[row].weights))
        for end in deltas.ended:
            self.ended[handles[end.row]] = end.reason
            if end.reason is FinishReason.ERROR:
                self.refused[handles[end.row]] = f"{end.param}: {end.message}"
                self.error_kinds[handles[end.row]] = end.kind
        self.pooled.update((handles[row], vector) for row, vector in deltas.pooled.items())

    def event(self, event: Received | PeerUp | PeerLost) -> None:
        self.now += 0.001
        self.take(self.core.handle(event, self.now))
        self.core.check()
        while sends := self.core.plan(int(self.now * 1e9)):
            self.take(sends)
            self.core.check()
        self.take(self.core.report())

    def step(self) -> None:
        self.event(Received(WORKER, LIFE, self.model.run(self.plans.popleft())))

    def lose_worker(self) -> None:
        """Its KV cache goes with it."""
        self.plans.clear()
        self.event(PeerLost(WORKER, LIFE))
        self.model, self.weights = self.model.fresh(), WeightsVersion()
        self.directory = PrefixCacheMirror()
        self.event(PeerUp(WORKER, LIFE))

    def assign(self, handle: int, prompt: list[int], max_tokens: int, **params: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=params.pop("stop", ()))  # type: ignore[arg-type]
        work = EngineRequest(
            RequestId(f"r{handle}"),
            Handle(handle),
            pack_i32(prompt),
            sampling,
            arrival_s=float(handle),
            **params,  # type: ignore[arg-type]
        )
        self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.plans:
                break
            self.step()
        assert not self.core.requests, "requests that nobody finishes"
        assert self.core.batching.kv.pool.num_free == self.model.num_blocks, "leaked blocks"


def limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    return Limits(**{**values, **changes})
