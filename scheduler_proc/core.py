"""The scheduler's pure core: owns this rank's requests and KV blocks.

`handle(event, now)` takes what happened, `plan(now_ns)` gives the next step as long as fewer than `async_depth` are in
flight, `report()` says what the coordinator should know of it. Called by io.py; never sees a socket or a clock.
"""

from collections import deque
from itertools import repeat

from meshlm.protocol.admit_edge import AbortRequests, Assign, GiveBack, Readmit, ReportLoad, Started
from meshlm.protocol.columns import pack_i32, unpack_i32
from meshlm.protocol.ids import COORDINATOR, ErrorKind, FinishReason, Handle, Identity, RequestId, Role, StepId
from meshlm.protocol.lockstep import JointOrder
from meshlm.protocol.operations import Operation, OperationDone, ResetPrefixCache
from meshlm.protocol.step_edge import LastPlan, StepFailed, StepResult, WorkerReady, WorkerStats
from meshlm.protocol.token_edge import AttachTokens, Disown, Ended, StillThere, TokenDeltas
from meshlm.runtime.events import Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.scheduler_proc.batching import Batching, tokens_of
from meshlm.scheduler_proc.detokenizers import Detokenizers, Reach
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.load_reporter import LoadReporter
from meshlm.scheduler_proc.lockstep import Lockstep
from meshlm.scheduler_proc.operations import Operations
from meshlm.scheduler_proc.output import Output, of_position
from meshlm.scheduler_proc.plan import Inflight
from meshlm.scheduler_proc.request import Request, RequestState
from meshlm.scheduler_proc.workers import Workers


class Scheduler:
    """See the module docstring."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests: dict[RequestId, Request] = {}
        self.batching = Batching(limits, 0, 1, 0)
        self.workers = Workers(limits)
        self.operations = Operations(self.workers.all)
        self.lockstep = Lockstep(limits.async_depth + 1, limits.num_workers) if limits.lockstep else None
        self.inflight: deque[Inflight] = deque()
        self.num_steps = 0
        self._next_step = 1
        self._detokenizers = Detokenizers()
        self.load = LoadReporter()
        self._last_done_ns = 0

    @property
    def session(self) -> int:
        """With the workers."""
        return self.workers.session

    @property
    def _depth(self) -> int:
        """Steps in flight: one for each stage at least."""
        return max(self.limits.async_depth, self.limits.num_stages)

    @property
    def serving(self) -> bool:
        """All of this rank's workers can step."""
        return self.workers.serving

    def handle(self, event: Event, now: float) -> list[Send]:
        output = Output(int(now * 1e9), self.limits.dp_rank)
        effects: list[Send] = []
        timings: tuple[int, ...] = ()
        match event:
            case Received(message=StepResult() as result):
                timings = self._result(result, output)
            case Received():
                effects = self._received(event, output)
            case PeerUp():
                effects = self._peer_up(event, output, now)
            case PeerLost():
                effects = self._peer_lost(event, output)
            case Tick():
                self._expire(event.wall_s, output)
                self.load.tell_all()
                if self.lockstep is not None:
                    self.lockstep.tell_again()
        effects += [Send(to, message) for to, message in output.messages(timings)]
        return effects

    def report(self) -> list[Send]:
        """A Load, if one is due. After all news and the plan, which are not to wait for it, and once for a burst of requests."""
        serving, effects = self.serving, []
        if self.lockstep is not None:
            effects = self.lockstep.report(has_work=bool(self.requests))
            serving = serving or bool(self.lockstep.life)  # while the group prepares, requests wait where they are
        load = self.load.load(self.batching, serving, self.num_steps)
        return effects if load is None else [*effects, Send(COORDINATOR, load)]

    def _received(self, event: Received, output: Output) -> list[Send]:
        match event.message:
            case Assign() as assign:
                self._assign(assign, output)
            case AbortRequests() as abort:
                for request_id in abort.request_ids:
                    self._drop(self.requests.get(request_id))
                early = self._detokenizers.take_early(abort.request_ids)  # counts in the coordinator's ledger too
                self.load.ended += [one.work.request_id for one in early]
            case GiveBack() as ask:
                self._give_back(ask)
            case ReportLoad() as ask_load:
                self.load.asked(ask_load.number)
            case WorkerReady() as ready:
                return self._worker_ready(event.sender, ready, output)
            case LastPlan() as standing:
                return self.workers.standing(event.sender, standing)
            case JointOrder() as order if self.lockstep is not None and self.lockstep.follow(order):
                self._lose_workers()
                self._next_step = 1
                return self.workers.begin(output.now_ns / 1e9, self.lockstep.group)
            case Operation() as operation:
                self.operations.add(operation)
                return self._operate(operation) if self.serving else []
            case OperationDone() as done:
                return self.operations.answered(event.sender, done)
            case WorkerStats() as stats:
                self.load.worker(stats.graphs, event.incarnation)
            case StepFailed() as failed:
                self._step_failed(failed, output)
            case AttachTokens() as attach:
                self._attach(attach, output)
            case Disown() as disown:
                nobodys = set(unpack_i32(disown.handles))
                for request in [r for r in self.requests.values() if r.detokenizer == event.sender]:
                    if request.handle in nobodys:
                        self._drop(request)
            case StillThere() as asked:
                return self._still_there(event.sender, asked)
        return []

    # --- requests ---

    def _assign(self, assign: Assign, output: Output) -> None:
        work = assign.work
        reach = self._detokenizers.meet(assign)
        if reach is not Reach.HERE:
            if reach is Reach.GONE:
                self.load.ended.append(work.request_id)
            return
        known = self.requests.get(work.request_id)
        if known is not None:
            if known.work.attempt >= work.attempt and known.incarnation == assign.incarnation:
                return  # a repetition
            self._drop(known)
        request = Request(
            work, self._detokenizers.the(assign.detokenizer), assign.incarnation, self.limits.max_model_len
        )
        request.arrived_ns = output.now_ns
        self.requests[work.request_id] = request
        self.batching.enqueue(request)
        if len(request.tokens) >= request.max_len and request.pool is None:
            self._finish(request, output, FinishReason.LENGTH)
        elif self.serving:
            self._refuse_unfit(request, output)

    def _refuse_unfit(self, request: Request, output: Output) -> None:
        """End it where these workers can never compute it."""
        if request.pool is not None and request.pool.kind not in self.batching.pool_kinds:
            text, param = f"the workers of this model cannot pool {request.pool.kind.value!r}", "task"
        elif self.batching.kv.holds(request.max_len):
            return
        else:
            room = self.batching.kv.longest(request.max_len)  # it takes as long as all the rest of an Assign
            if request.pool is not None:
                text, param = f"the prompt has {request.num_prompt} tokens, and the KV cache holds {room}", "prompt"
            else:
                text = (
                    f"this request may need {request.max_len} tokens of KV cache (prompt {request.num_prompt} + max_tokens), and the "
                    f"cache holds {room}: at most {max(0, room - request.num_prompt)} max_tokens fit"
                )
                param = "max_tokens"
        self._finish(request, output, FinishReason.ERROR, text, ErrorKind.INVALID, param)

    def _finish(
        self,
        request: Request,
        output: Output,
        reason: FinishReason,
        message: str = "",
        kind: ErrorKind = ErrorKind.INTERNAL,
        param: str = "",
    ) -> None:
        """End it with a terminal row of its own."""
        output.end(request, reason, message, kind, param)
        self._drop(request)

    def too_long(self, detokenizer: Identity, deltas: TokenDeltas, text: str) -> list[Send]:
        """No frame holds these rows of ours: their requests end where they were before."""
        starts = unpack_i32(deltas.starts)
        rows: dict[int, int] = {}  # handle -> its first token that was not told
        for handle, start in zip(unpack_i32(deltas.handles), starts, strict=True):
            rows.setdefault(handle, start)
        for request in [r for r in self.requests.values() if r.detokenizer == detokenizer and r.handle in rows]:
            self._drop(request)
        ended = [Ended(row, FinishReason.ERROR, message=text) for row in range(len(rows))]
        told = TokenDeltas(
            pack_i32(rows), pack_i32(rows.values()), pack_i32([0] * len(rows)), token_ids=b"", ended=ended
        )
        return [Send(detokenizer, told)]

    def _drop(self, request: Request | None) -> None:
        """Forget a request and free what it holds; steps in flight may still carry it."""
        if request is not None:
            self._remove(request)
            self.load.ended.append(request.work.request_id)

    def _remove(self, request: Request) -> None:
        """Like `_drop`, but the coordinator is not told that it ended."""
        self.batching.remove(request)
        request.move(RequestState.FINISHED)
        del self.requests[request.work.request_id]
        self.load.live_tokens -= len(request.tokens) - request.num_given

    def _give_back(self, ask: GiveBack) -> None:
        """Drop what does not run and has not started, so that it may go elsewhere; without workers, what had started too."""
        leaving = (RequestState.WAITING,) if self.serving else (RequestState.WAITING, RequestState.PREEMPTED)
        for request_id in list(self.requests) if ask.everything else ask.request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.state in leaving:
                num_crashes = request.num_crashes if request.crashed_at == len(request.tokens) else 0
                self.load.give_back(request.work, request.detokenizer, request.incarnation, num_crashes)
                self._remove(request)
        for one in self._detokenizers.take_early(None if ask.everything else ask.request_ids):
            self.load.give_back(one.work, one.detokenizer, one.incarnation, one.work.num_crashes)

    def _still_there(self, detokenizer: Identity, asked: StillThere) -> list[Send]:
        """It admits again what is not here: given back, and the coordinator may not have lived to say so."""
        here = {r.handle for r in self.requests.values() if r.detokenizer == detokenizer}
        gone = tuple(Handle(handle) for handle in unpack_i32(asked.handles) if handle not in here)
        return [Send(detokenizer, Readmit(gone))] if gone else []

    def _expire(self, wall_s: float, output: Output) -> None:
        late = [request for request in self.requests.values() if 0 < request.work.deadline_s <= wall_s]
        for request in late:
            self._finish(request, output, FinishReason.ERROR, "the request's timeout passed", ErrorKind.TIMEOUT)

    def _attach(self, attach: AttachTokens, output: Output) -> None:
        for request in self.requests.values():
            if request.work.handle == attach.handle:
                known = tokens_of(request, attach.from_index)
                output.of(request.detokenizer).row(attach.handle, attach.from_index, known)

    # --- workers ---

    def _peer_up(self, event: PeerUp, output: Output, now: float) -> list[Send]:
        if event.identity.role is Role.WORKER:
            self._lose_workers()
            self._next_step = 1
            sends = self.workers.up(event.identity, event.incarnation, now)
            if self.lockstep is not None:
                self.lockstep.begin(self.workers.session if sends else 0)
            return sends
        if event.identity == COORDINATOR:
            self.load.begin()
            if self.lockstep is not None:
                self.lockstep.tell_again()
        elif event.identity.role is Role.DETOKENIZER:
            for assign in self._detokenizers.up(event.identity, event.incarnation):
                self._assign(assign, output)
        return []

    def _peer_lost(self, event: PeerLost, output: Output) -> list[Send]:
        if event.identity.role is Role.WORKER:
            if self.lockstep is not None:
                self.lockstep.lost()
            crashed = dict.fromkeys(request for record in self.inflight for request in record.batch)
            self._lose_workers()
            for request in crashed:
                if request.state is not RequestState.FINISHED and request.crashed() >= self.limits.max_crashes:
                    text = f"given up: its worker died {self.limits.max_crashes} times, each time before the next token"
                    self._finish(request, output, FinishReason.ERROR, text)
            return self.workers.lost(event.identity, event.incarnation)
        elif event.identity.role is Role.DETOKENIZER:
            self._detokenizers.lost(event.identity, event.incarnation)
            for request in list(self.requests.values()):
                if request.detokenizer == event.identity and request.incarnation == event.incarnation:
                    self._drop(request)
        return []

    def _lose_workers(self) -> None:
        """What was computed is gone: all requests wait again with the tokens they have."""
        self.workers.forget()
        self.inflight.clear()
        self._last_done_ns = 0
        for request in list(self.batching.running):
            self.batching.preempt(request)
        for request in self.requests.values():
            request.num_output_placeholders = 0

    def _worker_ready(self, sender: Identity, ready: WorkerReady, output: Output) -> list[Send]:
        facts = self.workers.ready(sender, ready)
        if not facts:
            return []
        if self.lockstep is not None:
            self.lockstep.prepared()
        before = self.batching
        num_blocks, num_rows = min(f.num_blocks for f in facts), min(f.max_num_seqs for f in facts)
        self.batching = Batching(
            self.limits,
            num_blocks,
            facts[0].block_size,
            num_rows,
            min(f.max_drafts for f in facts),
            facts[0].kv_specs,
            frozenset(facts[0].pool_kinds),
            facts[0].pooled_bytes,
        )
        self.batching.num_preemptions = before.num_preemptions
        self.batching.cache_queries, self.batching.cache_hits = before.cache_queries, before.cache_hits
        self.batching.restore(facts)
        for request in before.waiting:
            request.hashes = []
            self.batching.enqueue(request)
        for request in before.waiting:
            self._refuse_unfit(request, output)
        pending = list(self.operations.pending.values())
        return [send for operation in pending for send in self._operate(operation)]

    def _operate(self, operation: Operation) -> list[Send]:
        """Between the plans that were sent and the next: what it changes here, then the workers."""
        match operation.action:
            case ResetPrefixCache(preempt=preempt):
                if not self.batching.reset_prefix_cache(preempt=preempt):
                    return self.operations.refuse(operation, f"{len(self.batching.running)} requests run")
        return self.operations.send(operation)

    def _step_failed(self, failed: StepFailed, output: Output) -> None:
        """The requests of the step end; what it would have written to the cache cannot be trusted."""
        if failed.session != self.session or not self.inflight:
            return
        record = self._finished()
        for request in dict.fromkeys(record.batch):
            if request.state is not RequestState.FINISHED:
                self._finish(request, output, FinishReason.ERROR, f"the model failed: {failed.message}")
        self.batching.kv.reset_prefix_cache(self.batching.running)

    # --- steps ---

    def _finished(self) -> Inflight:
        """The oldest step in flight is over."""
        if self.lockstep is not None:
            self.lockstep.finished()
        return self.inflight.popleft()

    def plan(self, now_ns: int) -> list[Send]:
        """The next step for all workers of the rank, if one may be sent now and has something to do."""
        if not self.serving or len(self.inflight) >= self.batching.budget.depth(self._depth):
            return []
        lockstep = self.lockstep
        if lockstep is not None and not lockstep.may_step():
            return []
        goes_on = bool(self.batching.running)
        step = StepId(self._next_step)
        planned = self.batching.plan(self.session, step, now_ns, may_be_empty=lockstep is not None)
        if planned is None:
            return []
        if lockstep is not None:
            lockstep.stepped()
        plan, record = planned
        record.goes_on = goes_on
        self._next_step += 1
        self.num_steps += 1
        self.inflight.append(record)
        return [Send(worker, plan) for worker in self.workers.all]

    def _result(self, result: StepResult, output: Output) -> tuple[int, ...]:
        if result.session != self.session or not self.inflight or self.inflight[0].step != result.step:
            return ()  # of an earlier session, or another worker's copy
        record = self._finished()
        self._learn(record, result)
        self.load.prompt_tokens += record.num_tokens - record.num_decode_tokens
        tokens = unpack_i32(result.token_ids)
        if record.samples or record.num_drafts or result.counts or result.logprobs or result.prompt_logprobs:
            self._tokens_with_details(record, result, tokens, output)
        else:
            self._tokens(record.batch, tokens, output)
        at = (record.planned_ns, result.received_ns, result.launched_ns, result.done_ns, output.now_ns)
        return (result.step, *at, result.gpu_ns, result.gap_ns)

    def _tokens(self, batch: list[Request], tokens: "memoryview[int]", output: Output) -> None:
        """One token for each entry of the batch, where a request may stand several times. The hot loop of a result: everything
        rare is in a branch."""
        block_size = self.batching.block_size
        detokenizer: Identity | None = None
        box = None
        finished = RequestState.FINISHED
        num_dead = 0
        for request, token in zip(batch, tokens, strict=True):
            if request.state is finished:
                num_dead += 1  # it ended while this step was in flight
                continue
            if box is None or request.detokenizer is not detokenizer:
                detokenizer = request.detokenizer
                box = output.of(detokenizer)
            known = request.tokens
            known.append(token)
            request.num_output_placeholders -= 1
            length = len(known)
            row = box.token(request.handle, length - 1 - request.num_prompt, token)
            if request.num_cached >= 0:
                self.load.started.append(Started(request.work.request_id, request.num_cached))
                box.first(row, request)
            if length % block_size == 1:
                self.batching.appended(request, length)
            if token in request.stop_ids:
                box.ended.append(Ended(row, FinishReason.STOP, token))
                self._drop(request)
            elif length >= request.max_len:
                box.ended.append(Ended(row, FinishReason.LENGTH))
                self._drop(request)
        self.load.generation_tokens += len(batch)
        self.load.live_tokens += len(batch) - num_dead

    def _tokens_with_details(
        self, record: Inflight, result: StepResult, tokens: "memoryview[int]", output: Output
    ) -> None:
        """A step with unfinished prompts, logprobs or several tokens a row, request by request."""
        samples = record.samples or b"\x01" * len(record.batch)
        counts = iter(unpack_i32(result.counts)) if result.counts else repeat(1)
        at = 0
        for place, request in enumerate(record.batch):
            alive = request.state is not RequestState.FINISHED
            if place in result.prompt_logprobs and alive:
                if place in record.firsts:  # perhaps again, after a preemption or the worker's death
                    request.prompt_logprobs.clear()
                request.prompt_logprobs.append(result.prompt_logprobs[place])
            if place in result.pooled and alive:
                if request.num_cached >= 0:
                    self.load.started.append(Started(request.work.request_id, request.num_cached))
                output.vector(request, result.pooled[place])
                self._drop(request)
            if not samples[place]:
                continue
            count = next(counts)
            if alive:
                self._not_given(request, 1 + (record.num_drafts[place] if record.num_drafts else 0) - count)
                for nth in range(count):
                    output.seal(request.detokenizer)
                    if place in result.logprobs and request.state is not RequestState.FINISHED:
                        output.of(request.detokenizer).next_logprobs(of_position(result.logprobs[place], nth))
                    self._tokens([request], tokens[at + nth : at + nth + 1], output)
            at += count

    def _not_given(self, request: Request, count: int) -> None:
        """So many tokens less came than the step might have given: drafts that were refused. What comes next is computed again."""
        request.num_output_placeholders -= count
        if request.state is RequestState.RUNNING:
            request.num_computed -= count

    def _learn(self, record: Inflight, result: StepResult) -> None:
        """The device's time for this step: its own word, or from launch or the end of the step before, whichever was later."""
        begun = max(result.launched_ns, self._last_done_ns)
        gap_ns = result.gap_ns if result.gpu_ns else begun - (self._last_done_ns or begun)
        self._last_done_ns = result.done_ns
        duration_ns = result.gpu_ns or result.done_ns - begun
        self.batching.budget.learn(record.num_tokens, record.num_decode_tokens, duration_ns / 1e9)
        self.load.busy_ns += duration_ns
        self.load.idle_ns += gap_ns if record.goes_on else 0

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.batching.check()
        queued = [*self.batching.running, *self.batching.waiting]
        assert {id(r) for r in queued} == {id(r) for r in self.requests.values()}, "the queues are not all requests"
        assert len(self.inflight) <= self._depth + 1
        live = sum(len(r.tokens) - r.num_given for r in self.requests.values())
        assert self.load.live_tokens == live
        owed: dict[int, int] = {}
        for record in self.inflight:
            samples = record.samples or b"\x01" * len(record.batch)
            num_drafts = record.num_drafts or [0] * len(record.batch)
            for request, sampled, drafted in zip(record.batch, samples, num_drafts, strict=True):
                owed[id(request)] = owed.get(id(request), 0) + sampled + drafted
        for request in self.requests.values():
            assert request.num_output_placeholders == owed.get(id(request), 0), (
                "tokens in flight differ from what was sent"
            )
            assert len(request.tokens) + request.num_output_placeholders <= request.max_len, "more tokens than allowed"
