"""The results of steps: takes their tokens, log-probabilities and vectors into the requests and the output.

Pure; owned by core.py, which knows which step in flight a result belongs to. It plans nothing.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from meshlm.protocol.edges.admit import Started
from meshlm.protocol.edges.step import StepResult
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import FinishReason, Identity
from meshlm.scheduler_proc.drafts import GONE
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.plan import Inflight
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.request_table import RequestTable
from meshlm.scheduler_proc.sizes import MAX_STEP_BYTES
from meshlm.scheduler_proc.states import RequestState


class Sampled(NamedTuple):
    """What requests got of a step. Columns of those that sample, and their tokens one behind the other."""

    requests: list[Request]
    places: Sequence[int]  # in the batch
    counts: list[int]  # tokens
    allowed: Sequence[int]  # drafts, at most
    tokens: list[int]
    logprobs: dict[int, LogprobColumns]  # by place, of all its tokens


def _up_to_its_end(request: Request, given: list[int]) -> list[int]:
    """Of these tokens, one at least, those up to the first with which the request ends."""
    room = request.max_len - len(request.tokens)
    if room < len(given):
        given = given[: max(1, room)]
    if not request.stop_ids.isdisjoint(given):
        given = given[: 1 + next(nth for nth, token in enumerate(given) if token in request.stop_ids)]
    if request.repetition is not None:
        before = len(request.tokens)
        for nth, token in enumerate(given):
            request.tokens.append(token)
            if _repeats(request):
                given = given[: nth + 1]
                break
        del request.tokens[before:]
    return given


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
        if result.failed or result.prompt_logprobs or result.pooled:
            self._take_details(record, result, output)
        batch, allowed = record.batch, record.num_drafts
        places: Sequence[int] = range(len(batch))
        if record.samples:
            places = [place for place in places if record.samples[place]]
            batch = [batch[place] for place in places]
            allowed = array("i", [allowed[place] for place in places] if allowed else ())
        counts = ints(result.counts) if result.counts else [1] * len(batch)
        if allowed:
            self._verified(batch, allowed, result, counts)
        sampled = Sampled(batch, places, counts, allowed or [0] * len(batch), ints(result.token_ids), result.logprobs)
        self._give(sampled, output)

    def _give(self, sampled: Sampled, output: Output) -> None:
        """Requests get their tokens; one may stand there several times. The hot loop of a result: everything rare is in a branch."""
        batching, load, drop = self._table.batching, self._table.load, self._table.drop
        block_size, logprobs, tokens = batching.block_size, sampled.logprobs, sampled.tokens
        detokenizer: Identity | None = None
        box = None
        finished = RequestState.FINISHED
        end = num_given = 0
        for request, place, count, most in zip(*sampled[:4], strict=True):
            begin, end = end, end + count
            if request.state is finished:
                continue  # it ended while this step was in flight
            request.num_output_placeholders -= 1 + most
            if count <= most and request.state is RequestState.RUNNING:
                request.num_computed -= 1 + most - count  # drafts were refused: their positions are computed again
            if not count:
                continue
            if box is None or request.detokenizer is not detokenizer or box.num_detail_bytes > MAX_STEP_BYTES:
                detokenizer = request.detokenizer
                box = output.open_box(detokenizer)
            if request.drafts:
                box.drafts[len(box.handles)] = request.drafts
                request.drafts = b""
            if request.num_cached >= 0:
                load.started.append(Started(request.work.request_id, request.num_cached))
                box.first(len(box.handles), request)
                if request.hands_off:
                    self._table.leaving.append(request)
            known = request.tokens
            length = len(known) + count
            if count == 1 and not logprobs:
                token = tokens[begin]
                known.append(token)
                row = box.token(request.handle, length - 1 - request.num_prompt, token)
            else:
                given = tokens[begin:end]
                stops = not request.stop_ids.isdisjoint(given)
                if stops or length > request.max_len or request.repetition is not None:
                    given = _up_to_its_end(request, given)
                    length, count = length - count + len(given), len(given)
                known.extend(given)
                token, start = given[-1], length - count - request.num_prompt
                if logprobs and place in logprobs:
                    box, row = output.add_details(request, start, given, logprobs[place])
                else:
                    row = box.rows([request.handle] * count, range(start, start + count), given)
            num_given += count
            if (length - 1) % block_size < count:
                batching.appended(request, length - (length - 1) % block_size)
            if token in request.stop_ids:
                box.end(row, request, FinishReason.STOP, token)
                drop(request)
            elif length >= request.max_len:
                box.end(row, request, FinishReason.LENGTH)
                drop(request)
            elif request.repetition is not None and _repeats(request):
                box.end(row, request, FinishReason.REPETITION)
                drop(request)
        load.generation_tokens += num_given
        load.live_tokens += num_given
        self._num_given += num_given

    def _take_details(self, record: Inflight, result: StepResult, output: Output) -> None:
        """What few requests of a step have."""
        for place in sorted({*result.failed, *result.prompt_logprobs, *result.pooled}):
            request = record.batch[place]
            if request.state is RequestState.FINISHED:
                continue
            if place in result.failed:
                self._table.fail_row(request, output, result.failed[place])
                continue
            if place in result.prompt_logprobs:
                if place in record.firsts:  # perhaps again, after a preemption or the worker's death
                    request.prompt_logprobs.clear()
                request.prompt_logprobs.append(result.prompt_logprobs[place])
            if place in result.pooled:
                if request.num_cached >= 0:
                    self._table.load.started.append(Started(request.work.request_id, request.num_cached))
                output.vector(request, result.pooled[place])
                self._table.drop(request)

    def _verified(self, batch: list[Request], allowed: "array[int]", result: StepResult, counts: list[int]) -> None:
        """Counts the drafts of a step, and what is learned of them: of each request that samples how many it was allowed, and how many
        tokens it got."""
        batching = self._table.batching
        rows = [request.row if request.state is not RequestState.FINISHED else GONE for request in batch]
        if batching.limits.counts_drafts:
            drafted = ints(result.drafted) if result.drafted else allowed
            for request, row, number, count in zip(batch, rows, drafted, counts, strict=True):
                if number and row != GONE:
                    request.drafts += bytes((number, max(0, count - 1)))
        if batching.drafts is not None:
            batching.drafts.verified(rows, allowed, result, batching.counts)

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
            record.num_tokens + record.num_encoded, record.num_decode_tokens, duration_ns / 1e9, record.num_pairs
        )
        num_drafts = sum(record.num_drafts)
        if (drafts := self._table.batching.drafts) is not None and record.num_tokens == record.num_decode_tokens:
            drafts.times.learn(record.num_tokens - num_drafts, num_drafts, duration_ns / 1e9)
        load.busy_ns += duration_ns
        self._table.batching.counts.histograms["step_device_time_seconds"].observe(duration_ns / 1e9)
        load.idle_ns += gap_ns if record.goes_on else 0
