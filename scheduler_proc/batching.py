"""What the next step computes: running requests first, then waiting ones, within one token budget.

Asynchronous scheduling makes steps overlap: step N+1 is planned and sent while N runs. What makes that safe is
that a worker executes plans strictly in the order of sending, on one stream. So a row or block that a plan frees may be
given away by the next plan at once: whatever an earlier step still writes there is written before the new owner's
step runs. A token that the last step samples is counted in `num_inflight` until its result is here.
"""

from array import array
from bisect import insort

from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import BlockId, Row, StepId
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.scheduler_proc import prefix
from meshlm.scheduler_proc.blocks import BlockPool
from meshlm.scheduler_proc.budget import StepBudget
from meshlm.scheduler_proc.events import Limits
from meshlm.scheduler_proc.plan import Inflight, PlanBuilder
from meshlm.scheduler_proc.request import Request, RequestState

OrderKey = tuple[int, float, str]


class Batching:
    """Queues, rows and blocks of one rank; owned by core.py."""

    def __init__(self, limits: Limits, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.limits, self.block_size = limits, block_size
        self.pool = BlockPool(num_blocks)
        self.budget = StepBudget(limits.max_num_batched_tokens)
        self.waiting: list[Request] = []  # both lists sorted by _key
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.cache_queries = 0  # tokens
        self.cache_hits = 0  # tokens
        self._free_rows = [Row(row) for row in reversed(range(min(num_rows, limits.max_num_seqs)))]
        self._removed_rows: list[Row] = []

    def _key(self, request: Request) -> OrderKey:
        priority, arrival, request_id = request.order
        return (priority if self.limits.by_priority else 0, arrival, request_id)

    def enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Take a finished request out and free what it holds."""
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = request.num_remembered = 0
        self._removed_rows.append(request.row)
        self._free_rows.append(request.row)
        request.row = Row(-1)

    def preempt(self, request: Request) -> None:
        """Free all it holds; it waits again and is recomputed."""
        self.running.remove(request)
        request.move(RequestState.PREEMPTED)
        self._give_back(request)
        self.num_preemptions += 1
        self.enqueue(request)

    # --- planning ---

    def plan(self, session: int, step: StepId, now_ns: int) -> tuple[StepPlan, Inflight] | None:
        """The next step, or None when nothing can be computed now."""
        builder = PlanBuilder(self._removed_rows)
        before = self.num_preemptions
        self._plan_running(builder)
        if self.num_preemptions == before:
            self._plan_waiting(builder)
        if not len(builder):
            return None
        self._removed_rows = []
        return builder.finish(session, step, now_ns)

    def _plan_running(self, builder: PlanBuilder) -> None:
        total = self.limits.max_num_batched_tokens
        num_decodes = sum(1 for r in self.running if len(r.tokens) + r.num_inflight - r.num_computed == 1)
        prefill_left = self.budget.prefill_limit(num_decodes)
        block_size = self.block_size
        at = 0
        while at < len(self.running):  # preemption shortens the list from its end
            request = self.running[at]
            at += 1
            virtual = len(request.tokens) + request.num_inflight
            count = virtual - request.num_computed
            if count <= 0 or virtual >= request.max_len:
                continue  # everything it may still get is on its way
            if count > 1:
                count = min(count, prefill_left)
                prefill_left -= count
            count = min(count, total - builder.num_tokens)
            if count <= 0:
                continue
            missing = -(-(request.num_computed + count) // block_size) - len(request.blocks)
            if missing > 0 and not self._make_room(request, missing):
                continue  # it was preempted itself
            if missing > 0:
                blocks = self.pool.allocate(missing)
                request.blocks += blocks
                builder.grow(request.row, blocks)
            self._advance(builder, request, count, virtual)

    def _make_room(self, request: Request, missing: int) -> bool:
        """Preempt from the end of the order until `missing` blocks are free. False when the request itself had to go.

        The end of the list is never planned yet: planning goes from the front.
        """
        while self.pool.num_free < missing:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _advance(self, builder: PlanBuilder, request: Request, count: int, virtual: int) -> None:
        samples = request.num_computed + count == virtual
        builder.add(request, count, samples)
        request.num_computed += count
        if samples:
            request.num_inflight += 1
        known = min(request.num_computed, len(request.tokens))
        if self.limits.prefix_caching and known // self.block_size > request.num_remembered:
            self._remember(request, known)

    def _remember(self, request: Request, known: int) -> None:
        """Tell the pool which of the request's blocks are now full of known tokens."""
        prefix.extend(request.hashes, self._seed(request), request.tokens, self.block_size, known)
        for index in range(request.num_remembered, known // self.block_size):
            self.pool.remember(request.blocks[index], request.hashes[index])
        request.num_remembered = known // self.block_size

    def _seed(self, request: Request) -> bytes:
        return prefix.seed_hash(request.work.cache_salt)

    def _plan_waiting(self, builder: PlanBuilder) -> None:
        at = 0
        left = self.budget.prefill_limit(builder.num_decodes) - (builder.num_tokens - builder.num_decodes)
        while at < len(self.waiting) and self._free_rows and left > 0:
            request = self.waiting[at]
            if request.num_inflight:
                at += 1  # preempted with results outstanding: others may pass
                continue
            cached = self._cached_blocks(request)
            num_cached = len(cached) * self.block_size
            count = len(request.tokens) - num_cached
            if count > left and not self.limits.chunked_prefill and builder.num_tokens:
                return
            count = min(count, left)
            missing = -(-(num_cached + count) // self.block_size) - len(cached)
            self.pool.share(cached)
            if missing > self.pool.num_free:
                self.pool.release(cached)
                return
            self._start(builder, request, at, cached, missing)
            left -= count
            self._advance(builder, request, count, len(request.tokens))

    def _cached_blocks(self, request: Request) -> list[BlockId]:
        """The longest known prefix, less the last token: one token at least is computed, to have logits."""
        if not self.limits.prefix_caching or request.work.sampling.prompt_logprobs >= 0:
            return []
        usable = len(request.tokens) - 1
        prefix.extend(request.hashes, self._seed(request), request.tokens, self.block_size, usable)
        found: list[BlockId] = []
        for block_hash in request.hashes[: usable // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _start(self, builder: PlanBuilder, request: Request, at: int, cached: list[BlockId], missing: int) -> None:
        """Give the request its row and first blocks."""
        del self.waiting[at]
        insort(self.running, request, key=self._key)
        request.blocks = cached + self.pool.allocate(missing)
        request.row = self._free_rows.pop()
        request.num_computed = len(cached) * self.block_size
        request.num_remembered = len(cached)
        if request.num_cached == -1:
            request.num_cached = min(request.num_computed, request.num_prompt)
            self.cache_queries += len(request.tokens)
            self.cache_hits += request.num_computed
        request.move(RequestState.RUNNING)
        builder.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.tokens.tobytes(),
                num_prompt_tokens=request.num_prompt,
                block_ids=pack_i32(request.blocks),
                sampling=request.work.sampling,
            )
        )

    def outstanding_prefill(self) -> int:
        """Prompt tokens that are not computed yet."""
        waiting = sum(len(request.tokens) for request in self.waiting)
        return waiting + sum(
            max(0, len(r.tokens) - r.num_computed) for r in self.running if r.num_computed < r.num_prompt
        )

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.pool.check([request.blocks for request in self.running])
        rows = [request.row for request in self.running]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert not set(rows) & set(self._free_rows), "a used row is free"
        for request in self.running:
            assert request.state is RequestState.RUNNING
            assert request.num_computed <= len(request.tokens) + request.num_inflight, "computed what does not exist"
            assert len(request.blocks) * self.block_size >= request.num_computed, "tokens without a block"
        for request in self.waiting:
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert not request.blocks
            assert request.row == -1
        assert self.running == sorted(self.running, key=self._key)
        assert self.waiting == sorted(self.waiting, key=self._key)


def tokens_of(request: Request, from_index: int) -> "array[int]":
    """Output tokens from `from_index` on."""
    return request.tokens[request.num_prompt + from_index :]
