"""What the next step computes: running requests first, then waiting ones, within one token budget.

Asynchronous scheduling makes steps overlap: step N+1 is planned and sent while N runs. What makes that safe is that a worker executes
plans strictly in the order of sending, on one stream. So a row or block that a plan frees may be given away by the next plan at once:
whatever an earlier step still writes there is written before the new owner's step runs. A token that the last step samples is counted
in `num_output_placeholders` until its result is here; a drafted one likewise, whether it will be accepted or not.

In a pipeline the first stage needs the token that the last one sampled, so a request that waits for a token is not planned again until
it is here, and with it what was accepted of its drafts, which each stage has made for itself. Instead each step takes its share of the
running requests: as many steps as there are stages are in flight, and alternate.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from math import isfinite

from meshlm.protocol.counts import SCHEDULER
from meshlm.protocol.edges.step import HASH_BYTES, NewRow, StepPlan, WorkerReady
from meshlm.protocol.kv import step_tokens
from meshlm.protocol.media import CACHED_STEPS
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.in_hand import hold
from meshlm.scheduler_proc import batching_counts, sizes
from meshlm.scheduler_proc.adapter_slots import AdapterSlots
from meshlm.scheduler_proc.budget import StepBudget
from meshlm.scheduler_proc.drafts import group_of, make_budget, plan_drafts
from meshlm.scheduler_proc.encoder_budget import EncoderBudget
from meshlm.scheduler_proc.extras import end_between
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.kv.events import CacheEvents
from meshlm.scheduler_proc.kv.residency import Residency
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.plan import Inflight, PlanBuilder
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import RankState, RequestState
from meshlm.scheduler_proc.trial import Trial

OrderKey = tuple[int, float, str]
NO_WORKERS = WorkerReady(0, num_blocks=0, block_size=1, max_num_seqs=0, max_num_batched_tokens=0, vocab_size=0)
QUEUE_SAMPLE = 64  # waiting requests that are looked at to know how much work waits


class Batching:
    """Queues, rows and blocks of one rank; owned by core.py."""

    def __init__(
        self, limits: Limits, facts: WorkerReady, rank: RankState | None = None, before: "Batching | None" = None
    ) -> None:
        """facts: what all workers of the rank hold. before: whose counts go on."""
        self.limits, self.facts, self._rank = limits, facts, rank or RankState()
        self.block_size = facts.block_size
        self.max_drafts, most = facts.max_drafts, limits.max_num_batched_tokens
        at_once = step_tokens(most, limits.async_depth, self.max_drafts)
        self.kv = KVCache(facts.num_blocks, facts.block_size, facts.kv_specs, limits.prefix_caching, at_once)
        self.most_requests = self.kv.side_by_side(limits.max_model_len)  # of the full context
        self.most_tokens = int(self.most_requests * limits.max_model_len) if isfinite(self.most_requests) else 0
        self.counts: Counts = Counts(SCHEDULER) if before is None else before.counts
        self.num_preemptions: int = 0 if before is None else before.num_preemptions
        self.cache_queries: int = 0 if before is None else before.cache_queries  # tokens
        self.cache_hits: int = 0 if before is None else before.cache_hits  # tokens
        if limits.kv_metrics_sample:
            self.kv.pool.residency = Residency(limits.kv_metrics_sample, self.counts)
        if limits.kv_events:
            self.kv.pool.events = CacheEvents() if before is None else before.kv.pool.events
        self.budget = StepBudget(most, even=limits.even_prefill, max_itl_s=limits.max_itl_s, wave=facts.attention_wave)
        self.encoder = EncoderBudget(limits.max_num_encoder_input_tokens or most, CACHED_STEPS * most)
        self.waiting: list[Request] = []  # both lists sorted by _key
        self.running: list[Request] = []
        self.now_ns = 0  # of the plan that is being made
        self.begun: Callable[[Request], None] | None = None  # hears of each that starts, where pages move
        self._trial, self._slots = Trial(limits.max_crashes), AdapterSlots(limits.max_loras)
        self._token_bytes = 0  # of the running requests' log-probabilities and vectors in each step
        max_rows = min(facts.max_num_seqs, limits.max_num_seqs)
        self.drafts = make_budget(max_rows, self.max_drafts)
        self._free_rows = [Row(row) for row in reversed(range(max_rows))]
        self._removed_rows: list[Row] = []

    def _key(self, request: Request) -> OrderKey:
        priority, arrival, request_id = request.order
        return (priority if self.limits.by_priority else 0, arrival, request_id)

    def enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=self._key)
        self._trial.enqueued(request)

    def remove(self, request: Request) -> None:
        """Take a finished request out and free what it holds."""
        if request.num_reused >= 0:
            self.budget.ended(request.num_prompt - request.num_reused, len(request.tokens) - request.num_prompt)
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            at = bisect_left(self.waiting, self._key(request), key=self._key)  # thousands may leave together
            while self.waiting[at] is not request:
                at += 1
            del self.waiting[at]
        else:
            self.running.remove(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self._token_bytes -= sizes.step_bytes(request, self.facts)
        self._slots.leave(request)
        self.kv.free(request)
        request.num_computed = 0
        self._removed_rows.append(request.row)
        self._free_rows.append(request.row)
        request.row = Row(-1)

    def preempt(self, request: Request, reason: str) -> None:
        """Free all it holds; it waits again and is recomputed. `reason`: what needs its place, for /metrics."""
        self.running.remove(request)
        request.move(RequestState.PREEMPTED)
        request.preempted_ns += (self.now_ns,)
        request.num_looks = 0
        self._give_back(request)
        self.num_preemptions += 1
        self.counts.add("num_preemptions_by_reason", reason)
        self.enqueue(request)

    def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Forget what the blocks hold. False, and nothing is done, while requests run that are not to be computed anew."""
        if self.running and not preempt:
            return False
        for request in list(self.running):
            self.preempt(request, "reset_prefix_cache")
        self.kv.reset_prefix_cache(self.running)
        return True

    @property
    def num_running(self) -> int:
        """The running requests; where the others may not begin, with those that were preempted."""
        return len(self.running) + (sum(one.has_begun for one in self.waiting) if self._rank.drains else 0)

    @property
    def may_work(self) -> bool:
        """Whether there are requests that a step may compute, now or later, as the rank is told to plan."""
        return not self._rank.rests and bool(self.num_running or (self.waiting and not self._rank.drains))

    # --- planning ---

    def plan(
        self, session: int, step: StepId, now_ns: int, *, may_be_empty: bool = False, is_idle: bool = True
    ) -> tuple[StepPlan, Inflight] | None:
        """The next step, or None when nothing can be computed now and no other rank needs it. is_idle: no request is in flight."""
        builder = PlanBuilder(self._removed_rows, now_ns, self.limits.num_stages > 1, self.kv.num_groups)
        self.now_ns = now_ns
        self.encoder.begin_plan()
        if self.kv.pool.residency is not None:
            self.kv.pool.residency.now_ns = now_ns
        if not (self._rank.rests or self._plan_trial(builder, is_idle=is_idle)):
            before = self.num_preemptions
            prompts = self._plan_decodes(builder, self.running)
            if self.drafts is not None and builder.decodes:
                token_s = self.budget.prompt_s if prompts or (self.waiting and self._free_rows) else 0.0
                most = self.limits.max_num_batched_tokens, self.facts.max_draft_lines
                plan_drafts(builder, self.kv, self.drafts, most, token_s)
            if prompts or self.waiting:
                context = prompts[0].num_computed if prompts else 0
                left = self.budget.prefill_limit(builder.num_tokens, self._outstanding(prompts), context)
                if builder.num_tokens:
                    self.encoder.limit(left)
                left = self._plan_prompts(builder, prompts, left)
                if self.num_preemptions == before:
                    self._plan_waiting(builder, left)
        if not (len(builder) or may_be_empty):
            return None
        self._removed_rows = []
        builder.num_encoded = self.encoder.num_encoded
        return builder.finish(session, step, self.kv.take_changes())

    def _plan_trial(self, builder: PlanBuilder, *, is_idle: bool) -> bool:
        """Plans a step of one suspect alone. False: there is none that may run, and the step is everybody's."""
        left = self.limits.max_num_batched_tokens
        if (suspect := self._trial.now) is not None:
            self._plan_prompts(builder, self._plan_decodes(builder, [suspect]), left)
            return True
        if (suspect := self._trial.next()) is None or (self._rank.drains and not suspect.has_begun):
            return False
        if is_idle:
            if not (self._free_rows and self._begin(builder, suspect, self.waiting.index(suspect), left)):
                return False  # others have the rows or the memory
            self._trial.begin(suspect)
        return True

    def _plan_decodes(self, builder: PlanBuilder, running: list[Request]) -> list[Request]:
        """Plans the decodes in one lean loop: with hundreds of them its length is the scheduler's cost. Returns running requests with
        more than one token to compute."""
        left = self.limits.max_num_batched_tokens
        stages = self.limits.num_stages
        if stages > 1:
            left = min(left, -(-len(running) // stages))
        prompts: list[Request] = []
        decodes, starts = builder.decodes, builder.decode_starts
        at = 0
        while at < len(running):  # preemption shortens the list from its end
            request = running[at]
            at += 1
            computed = request.num_computed
            virtual = len(request.tokens) + request.num_output_placeholders
            if virtual - computed != 1:
                if virtual > computed:
                    prompts.append(request)
                continue
            if virtual >= request.max_len or not left:
                if not request.generates:
                    prompts.append(request)  # its last token is computed, but nothing comes after it
                continue  # everything it may still get is on its way, unless drafts of it will be refused
            if stages > 1 and request.num_output_placeholders:
                continue
            if virtual > request.capacity and not self._grow(builder, request, virtual):
                continue  # it was preempted itself
            decodes.append(request)
            starts.append(computed)
            left -= 1
            request.num_computed = virtual
            request.num_output_placeholders += 1
        builder.num_tokens = len(decodes)
        return prompts

    def _outstanding(self, prompts: list[Request]) -> int:
        """Prompt tokens that these and the waiting have to compute, but for what the cache has; the first of a queue stand for all."""
        tokens = sum(
            len(request.tokens) + request.num_output_placeholders - request.num_computed for request in prompts
        )
        if self.waiting and self._free_rows:
            first = self.waiting[:QUEUE_SAMPLE]
            tokens += sum([len(request.tokens) for request in first]) * len(self.waiting) // len(first)
        return tokens

    def _plan_prompts(self, builder: PlanBuilder, prompts: list[Request], left: int) -> int:
        """Running requests with more than one token to compute, within `left` tokens; returns what is left of these."""
        for place, request in enumerate(prompts):
            virtual = len(request.tokens) + request.num_output_placeholders
            count = self._cut(builder, request, request.num_computed, virtual - request.num_computed, left)
            if count <= 0 and request.uncut:
                return 0  # a run of its tokens waits until fewer decode: nobody begins before it
            count = self.encoder.room(request, request.num_computed, count, chunked=self.limits.chunked_prefill)
            if count <= 0 or request.state is not RequestState.RUNNING:
                continue
            needed = request.num_computed + count
            if needed > request.capacity and not self._grow_prompt(builder, request, needed, prompts[place + 1 :]):
                continue  # the decodes have the memory; it waits for one of them to end
            left -= count
            self._advance(builder, request, count, virtual)
        return left

    def _grow(self, builder: PlanBuilder, request: Request, needed: int) -> bool:
        """Blocks for `needed` tokens, by preempting from the end of the order: nothing there is planned yet, as planning goes
        from the front. False when the request itself had to go."""
        while (blocks := self.kv.grow(request, needed, self.running)) is None:
            victim = self.running[-1]
            self.preempt(victim, "decode")
            if victim is request:
                return False
        builder.grow(request.row, blocks)
        return True

    def _grow_prompt(self, builder: PlanBuilder, request: Request, needed: int, later: list[Request]) -> bool:
        """Blocks for `needed` tokens, if need be by preempting prompts that come later. False when that is not enough."""
        victims = [victim for victim in later if victim.state is RequestState.RUNNING]
        while (blocks := self.kv.grow(request, needed, builder.decodes)) is None:
            if not victims:
                return False
            self.preempt(victims.pop(), "prefill")
        builder.grow(request.row, blocks)
        return True

    def _advance(self, builder: PlanBuilder, request: Request, count: int, virtual: int) -> None:
        samples = request.num_computed + count == virtual and request.generates
        builder.add(request, count, samples)
        self.encoder.take(request, request.num_computed, count)
        request.num_computed += count
        if samples:
            request.num_output_placeholders += 1
        self.kv.cache_full(request, min(request.num_computed, len(request.tokens)), sent=False)

    def appended(self, request: Request, num_tokens: int) -> None:
        """A result brought token number `num_tokens`; all before it are computed. Called when that fills a block."""
        if request.state is RequestState.RUNNING:
            self.kv.cache_full(request, min(num_tokens - 1, request.num_computed))

    def _plan_waiting(self, builder: PlanBuilder, left: int) -> None:
        at = 0
        self._slots.begin_plan()
        while at < len(self.waiting) and self._free_rows and left > 0:
            request = self.waiting[at]
            if request.pages_short and (self.running or request.waits):
                return  # the memory that comes free next is for the KV that it loads
            if (
                request.waits
                or (self._rank.drains and not request.has_begun)
                or request.is_suspect(self.limits.max_crashes)
                or self._slots.passed(request, self.now_ns)
                or self.encoder.passed(request)
            ):
                at += 1
                continue
            with hold(request.work.request_id):
                count = self._begin(builder, request, at, left)
            if not count and not self.encoder.passed(request):
                return
            at += not count
            left -= count

    def _begin(self, builder: PlanBuilder, request: Request, at: int, left: int) -> int:
        """Have the step compute the first tokens of waiting request number `at`; their number, 0 where there is no room."""
        num_cached = self.kv.match(request)
        count = self._startable(builder, request, num_cached, left) if self._slots.has_room(request) else 0
        if not count or self.kv.grow(request, num_cached + count, builder.decodes) is None:
            self.kv.free(request)
            return 0
        self._start(builder, request, at, num_cached)
        self._advance(builder, request, count, len(request.tokens))
        return count

    def _cut(self, builder: PlanBuilder, request: Request, start: int, count: int, left: int) -> int:
        """The number of the request's `count` tokens from `start` on that a step with room for `left` computes."""
        count = min(count, left)
        count = builder.prompt_room(request, self.kv.step_end(start, count) if self.limits.chunked_prefill else count)
        most = self.limits.max_num_batched_tokens - builder.num_tokens
        return end_between(request.uncut, start, count, most) if request.uncut else count

    def _startable(self, builder: PlanBuilder, request: Request, num_cached: int, left: int) -> int:
        """The number of the request's tokens behind `num_cached` that the step may compute; 0: it waits for another step."""
        count = len(request.tokens) - num_cached
        if count > left and not self.limits.chunked_prefill and builder.num_tokens:
            return 0
        count = self._cut(builder, request, num_cached, count, left)
        count = self.encoder.room(request, num_cached, count, chunked=self.limits.chunked_prefill)
        return count if self._message_room(builder, request) else 0

    def _message_room(self, builder: PlanBuilder, request: Request) -> bool:
        """Whether the step's messages stay short enough with it; the first one always may start. Where nearly all of many prompts is
        cached, this and not the tokens to compute bounds what a step starts."""
        token_bytes = self._token_bytes + sizes.step_bytes(request, self.facts)
        if self.running and token_bytes > sizes.MAX_STEP_BYTES and token_bytes > self._token_bytes:
            return False
        return not builder.new_rows or builder.new_row_bytes + sizes.new_row_bytes(request) <= sizes.MAX_START_BYTES

    def _start(self, builder: PlanBuilder, request: Request, at: int, num_cached: int) -> None:
        """Give the request, which has its first blocks, a row."""
        del self.waiting[at]
        if self.begun is not None:
            self.begun(request)
        insort(self.running, request, key=self._key)
        request.row = self._free_rows.pop()
        if self.drafts is not None:
            self.drafts.begin(request.row)
        request.num_computed = num_cached
        found = min(request.num_computed, request.num_prompt)
        # Where it begins anew before its first token, after a death, nothing may be left of what was found.
        if request.num_cached >= 0:
            request.num_cached = request.num_reused = min(request.num_cached, found)
        elif request.num_cached == -1:
            request.started_ns = builder.now_ns
            request.num_cached = request.num_reused = found
            self.cache_queries += len(request.tokens)
            self.cache_hits += max(0, request.num_computed - request.num_loaded)
            batching_counts.count_misses(self.counts, self.kv, request)
        request.move(RequestState.RUNNING)
        self._token_bytes += sizes.step_bytes(request, self.facts)
        self._slots.take(request)
        builder.new_row_bytes += sizes.new_row_bytes(request)
        work, tokens, blocks = request.work, request.tokens.tobytes(), pack_i32(request.blocks)
        group = group_of(work.cache_salt) if self.drafts is not None else b""
        new = NewRow(request.row, tokens, request.num_prompt, blocks, work.sampling, work.extras, group)
        builder.new_rows.append(new)

    def count(self) -> None:
        """Brings the gauges of /metrics up to date."""
        batching_counts.gauge(self.counts, self.kv, self.running, self.waiting)

    def restore(self, facts: list[WorkerReady]) -> None:
        """The prefix cache of an earlier session, where all workers still have the same."""
        (kept, hashes), *others = {(fact.kept, fact.kept_hashes) for fact in facts}
        if self.limits.prefix_caching and not others:
            self.kv.pool.restore(ints(kept), [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)])
        self.kv.pool.tell_inherited()

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.kv.check(self.running)
        self.encoder.check()
        self._slots.check(self.running)
        rows = [request.row for request in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert not set(rows) & set(self._free_rows), "a used row is free"
        for request in self.running:
            assert request.state is RequestState.RUNNING
            num_tokens = len(request.tokens) + request.num_output_placeholders
            assert request.num_computed <= num_tokens, "computed what does not exist"
            assert request.capacity >= request.num_computed, "tokens without a block"
        assert self._token_bytes == sum(sizes.step_bytes(request, self.facts) for request in self.running)
        for request in self.waiting:
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert not request.blocks
            assert request.row == -1
        assert self.running == sorted(self.running, key=self._key)
        assert self.waiting == sorted(self.waiting, key=self._key)
