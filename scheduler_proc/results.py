"""The results of steps: takes their tokens, log-probabilities and vectors into the requests and the output.

Pure; owned by core.py, which knows which step in flight a result belongs to. It plans nothing.
"""

from itertools import repeat

from meshlm.protocol.edges.admit import Started
from meshlm.protocol.edges.step import StepResult
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import FinishReason, Identity
from meshlm.scheduler_proc.output import Output, position_columns
from meshlm.scheduler_proc.plan import Inflight
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.request_table import RequestTable
from meshlm.scheduler_proc.states import RequestState


def _repeats(request: Request) -> bool:
    """Whether the request ends here, since its output repeats itself."""
    enough = len(request.tokens) - request.num_prompt >= request.work.sampling.min_tokens
    return enough and request.repetition is not None and request.repetition.ends(request.tokens, request.num_prompt)


class Results:
    """`table` has the requests; they end there."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._last_done_ns = 0
        self._num_given = 0  # tokens of the last result that requests got

    def begin(self) -> None:
        """Other workers compute from now on: no step of theirs has ended yet."""
        self._last_done_ns = 0

    def apply(self, record: Inflight, result: StepResult, output: Output) -> None:
        """`record` is the step that this is the result of."""
        self._learn(record, result)
        self._num_given = 0
        self._table.load.prompt_tokens += record.num_tokens - record.num_decode_tokens
        tokens = ints(result.token_ids)
        if (
            record.samples
            or record.num_drafts
            or result.counts
            or result.logprobs
            or result.prompt_logprobs
            or result.failed
        ):
            self._tokens_with_details(record, result, tokens, output)
        else:
            self._tokens(record.batch, tokens, output)

    def _tokens(self, batch: list[Request], tokens: list[int], output: Output) -> None:
        """One token for each entry of the batch, where a request may stand several times. The hot loop of a result: everything
        rare is in a branch."""
        batching, load, drop = self._table.batching, self._table.load, self._table.drop
        block_size = batching.block_size
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
                box = output.outbox_of(detokenizer)
            known = request.tokens
            known.append(token)
            request.num_output_placeholders -= 1
            length = len(known)
            row = box.token(request.handle, length - 1 - request.num_prompt, token)
            if request.num_cached >= 0:
                load.started.append(Started(request.work.request_id, request.num_cached))
                box.first(row, request)
                if request.hands_off:
                    self._table.leaving.append(request)
            if length % block_size == 1:
                batching.appended(request, length)
            if token in request.stop_ids:
                box.end(row, request, FinishReason.STOP, token)
                drop(request)
            elif length >= request.max_len:
                box.end(row, request, FinishReason.LENGTH)
                drop(request)
            elif request.repetition is not None and _repeats(request):
                box.end(row, request, FinishReason.REPETITION)
                drop(request)
        load.generation_tokens += len(batch)
        load.live_tokens += len(batch) - num_dead
        self._num_given += len(batch) - num_dead

    def _tokens_with_details(self, record: Inflight, result: StepResult, tokens: list[int], output: Output) -> None:
        """A step with unfinished prompts, logprobs or several tokens a row, request by request."""
        samples = record.samples or b"\x01" * len(record.batch)
        counts = iter(ints(result.counts)) if result.counts else repeat(1)
        all_drafted = iter(ints(result.drafted))
        verified: list[tuple[int, int, int]] = []  # row, drafts that it was allowed, those that were accepted
        at = 0
        for batch_index, request in enumerate(record.batch):
            alive = request.state is not RequestState.FINISHED
            if batch_index in result.failed and alive:
                self._table.fail_row(request, output, result.failed[batch_index])
                alive = False
            if batch_index in result.prompt_logprobs and alive:
                if batch_index in record.firsts:  # perhaps again, after a preemption or the worker's death
                    request.prompt_logprobs.clear()
                request.prompt_logprobs.append(result.prompt_logprobs[batch_index])
            if batch_index in result.pooled and alive:
                if request.num_cached >= 0:
                    self._table.load.started.append(Started(request.work.request_id, request.num_cached))
                output.vector(request, result.pooled[batch_index])
                self._table.drop(request)
            if not samples[batch_index]:
                continue
            count = next(counts)
            allowed = record.num_drafts[batch_index] if record.num_drafts else 0
            drafted = next(all_drafted, allowed)
            if alive:
                if drafted:
                    self._count_drafts(request, drafted, max(0, count - 1))
                if allowed and count and request.row >= 0:
                    verified.append((request.row, allowed, count - 1))
                self._not_given(request, 1 + allowed - count)
                for nth in range(count):
                    output.seal(request.detokenizer)
                    if request.drafts and request.state is not RequestState.FINISHED:
                        output.outbox_of(request.detokenizer).next_drafts(request.drafts)
                        request.drafts = b""
                    if batch_index in result.logprobs and request.state is not RequestState.FINISHED:
                        output.outbox_of(request.detokenizer).next_logprobs(
                            position_columns(result.logprobs[batch_index], nth)
                        )
                    self._tokens([request], tokens[at + nth : at + nth + 1], output)
            at += count
        if verified and (drafts := self._table.batching.drafts) is not None:
            drafts.acceptance.observe(*zip(*verified, strict=True))

    def _count_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        counts = self._table.batching.counts
        if self._table.batching.limits.counts_drafts:
            request.drafts += bytes((num_drafts, num_accepted))
        counts.add("spec_decode_num_drafts")
        counts.add("spec_decode_num_draft_tokens", amount=num_drafts)
        counts.add("spec_decode_num_accepted_tokens", amount=num_accepted)
        for position in range(num_accepted):
            counts.add("spec_decode_num_accepted_tokens_per_pos", str(position))

    def _not_given(self, request: Request, count: int) -> None:
        """`count` fewer tokens came than the step might have given, since drafts were refused; their positions are computed again."""
        request.num_output_placeholders -= count
        if request.state is RequestState.RUNNING:
            request.num_computed -= count

    def time(self, record: Inflight, result: StepResult, now_ns: int) -> None:
        """Observes how long each hop of the step took, up to this scheduler, and its tokens. Called behind `apply`."""
        hops = self._table.batching.counts.histograms
        hops["step_send_time_seconds"].between(record.planned_ns, result.received_ns)
        hops["step_launch_time_seconds"].between(result.received_ns, result.launched_ns)
        hops["step_return_time_seconds"].between(result.done_ns, now_ns)
        hops["iteration_tokens_total"].observe(record.num_tokens - record.num_decode_tokens + self._num_given)

    def _learn(self, record: Inflight, result: StepResult) -> None:
        """The device's time for this step: its own word, or from launch or the end of the step before, whichever was later."""
        begun = max(result.launched_ns, self._last_done_ns)
        gap_ns = result.gap_ns if result.gpu_ns else begun - (self._last_done_ns or begun)
        self._last_done_ns = result.done_ns
        duration_ns = result.gpu_ns or result.done_ns - begun
        load = self._table.load
        self._table.batching.budget.learn(
            record.num_tokens, record.num_decode_tokens, duration_ns / 1e9, record.num_pairs
        )
        num_drafts = sum(record.num_drafts)
        if (drafts := self._table.batching.drafts) is not None and record.num_tokens == record.num_decode_tokens:
            drafts.times.learn(record.num_tokens - num_drafts, num_drafts, duration_ns / 1e9)
        load.busy_ns += duration_ns
        self._table.batching.counts.histograms["step_device_time_seconds"].observe(duration_ns / 1e9)
        load.idle_ns += gap_ns if record.goes_on else 0
