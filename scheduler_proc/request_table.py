"""The requests of this rank, from their Assign to their end: the table owns them, and says which may wait for a step.

Pure; owned by core.py, which calls it for each event that concerns requests. It knows nothing of steps: `batching` plans them,
and results.py brings their tokens. Whatever ends here is told to the coordinator through `load`.
"""

from collections.abc import Callable, Collection, Container

from meshlm.protocol.edges.admit import Assign, EngineRequest, GiveBack, Readmit
from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.edges.token import AttachTokens, Ended, StillThere, TokenDeltas
from meshlm.protocol.extras import first_uncertain
from meshlm.protocol.wire.columns import pack_i32, unpack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId
from meshlm.runtime.process.events import Send
from meshlm.scheduler_proc.batching import NO_WORKERS, Batching
from meshlm.scheduler_proc.detokenizers import Detokenizers, Reach
from meshlm.scheduler_proc.extras import unfit
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.load_reporter import LoadReporter
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.plan import Inflight
from meshlm.scheduler_proc.preparations import Preparations
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import RequestState
from meshlm.scheduler_proc.workers import Workers

SHARED_IMAGE = "the same image could not be encoded for another request just now; send the request again"


class RequestTable:
    """`batching` is another object after each start of the workers; `workers` are only read."""

    def __init__(self, limits: Limits, workers: Workers) -> None:
        self._limits, self._workers = limits, workers
        self.by_id: dict[RequestId, Request] = {}
        self.batching = Batching(limits, NO_WORKERS, workers.rank)
        self.detokenizers = Detokenizers()
        self.load = LoadReporter(workers.rank)
        self.preparations = Preparations(workers.all)
        self.leaving: list[Request] = []  # of Assign.hands_off, with their first token
        self.removed: Callable[[Request], None] | None = None  # hears of each that is about to leave

    def assign(self, assign: Assign, output: Output) -> None:
        work = assign.work
        reach = self.detokenizers.reach_of(assign)
        if reach is not Reach.HERE:
            if reach is Reach.GONE:
                self.load.ended.append(work.request_id)
            return
        known = self.by_id.get(work.request_id)
        if known is not None:
            if known.work.attempt >= work.attempt and known.incarnation == assign.incarnation:
                return  # a repetition
            self.drop(known)
        request = Request(
            work, self.detokenizers.one_object(assign.detokenizer), assign.incarnation, self._limits.max_model_len
        )
        request.arrived_ns = output.now_ns
        if self._workers.weights is not None and self._workers.weights.key:
            request.extra_keys = request.extra_keys._replace(weights=self._workers.weights.key)
        request.holder, request.hands_off = assign.holder, assign.hands_off
        self.by_id[work.request_id] = request
        self.preparations.add(request)
        self.batching.enqueue(request)
        if len(request.tokens) >= request.max_len and request.generates:
            self.finish(request, output, FinishReason.LENGTH)
        elif self._workers.rank.serves:
            self.refuse_unfit(request, output)

    def refuse_unfit(self, request: Request, output: Output) -> None:
        """Ends a request that these workers can never compute."""
        most, longest = self._limits.max_num_batched_tokens, max((length for _, length in request.uncut), default=0)
        if text := next(
            filter(None, (unfit(extra, self.batching.facts.pool_kinds) for extra in request.work.extras)), ""
        ):
            param = "task"
        elif longest > most:
            text, param = (
                f"{longest} tokens of the prompt are computed together, and a step has room for {most}",
                "prompt",
            )
        elif self.batching.kv.holds(request.max_len):
            return
        else:
            room = self.batching.kv.longest(request.max_len)  # it takes as long as all the rest of an Assign
            if not request.generates:
                text, param = f"the prompt has {request.num_prompt} tokens, and the KV cache holds {room}", "prompt"
            else:
                text = (
                    f"this request may need {request.max_len} tokens of KV cache (prompt {request.num_prompt} + max_tokens), and the "
                    f"cache holds {room}: at most {max(0, room - request.num_prompt)} max_tokens fit"
                )
                param = "max_tokens"
        self.finish(request, output, FinishReason.ERROR, text, ErrorKind.INVALID, param)

    def finish(
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
        self.drop(request)

    def fail_row(self, request: Request, output: Output, failed: RowFailed) -> None:
        """End a request that its worker has no token for. Where its own parameters leave none, the error names one of them."""
        first = first_uncertain(request.work.extras)
        if first is not None and failed.kind is ErrorKind.INTERNAL:
            self._forget_from(request, first, output)
        param = (failed.param or _constraint(request.work)) if failed.kind is not ErrorKind.INTERNAL else ""
        kind = ErrorKind.INTERNAL if failed.kind is ErrorKind.INVALID and not param else failed.kind
        message = f"{param}: {failed.message}" if param else failed.message
        self.finish(request, output, FinishReason.ERROR, message, kind, param.split(".")[0])

    def _forget_from(self, request: Request, first: int, output: Output) -> None:
        """A worker had no vectors for an image, say, and computed the step without: no other request may find that. One that did so
        already, as steps are planned ahead, ends too."""
        wrong = self.batching.kv.forget(request, first)
        for other in list(self.by_id.values()):
            if other is not request and not wrong.isdisjoint(other.blocks):
                self.finish(other, output, FinishReason.ERROR, SHARED_IMAGE, ErrorKind.OVERLOADED)

    def too_long(self, detokenizer: Identity, deltas: TokenDeltas, text: str) -> list[Send]:
        """No frame holds these rows of ours: their requests end where they were before."""
        starts = unpack_i32(deltas.starts)
        rows: dict[int, int] = {}  # handle -> its first token that was not told
        for handle, start in zip(unpack_i32(deltas.handles), starts, strict=True):
            rows.setdefault(handle, start)
        for request in [r for r in self.by_id.values() if r.detokenizer == detokenizer and r.handle in rows]:
            self.drop(request)
        ended = [Ended(row, FinishReason.ERROR, message=text) for row in range(len(rows))]
        told = TokenDeltas(
            pack_i32(rows), pack_i32(rows.values()), pack_i32([0] * len(rows)), token_ids=b"", ended=ended
        )
        return [Send(detokenizer, told)]

    def drop(self, request: Request) -> None:
        """Forget a request and free what it holds; steps in flight may still carry it."""
        self.remove(request)
        self.load.ended.append(request.work.request_id)

    def abort(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            if (request := self.by_id.get(request_id)) is not None:
                self.drop(request)
        early = self.detokenizers.take_early(request_ids)  # counts in the coordinator's ledger too
        self.load.ended += [one.work.request_id for one in early]

    def disown(self, detokenizer: Identity, handles: Container[int]) -> None:
        """The detokenizer does not know these handles of ours."""
        for request in [r for r in self.by_id.values() if r.detokenizer == detokenizer]:
            if request.handle in handles:
                self.drop(request)

    def detokenizer_lost(self, identity: Identity, incarnation: Incarnation) -> None:
        """A detokenizer was lost: its requests end here, and its next incarnation admits them again."""
        self.detokenizers.lost(identity, incarnation)
        for request in list(self.by_id.values()):
            if request.detokenizer == identity and request.incarnation == incarnation:
                self.drop(request)

    def remove(self, request: Request) -> None:
        """Forgets a request as `drop` does, but the coordinator is not told that it ended."""
        if self.removed is not None:
            self.removed(request)
        self.batching.remove(request)
        self.preparations.remove(request)
        request.move(RequestState.FINISHED)
        del self.by_id[request.work.request_id]
        self.load.live_tokens -= len(request.tokens) - request.num_given

    def lose_workers(self) -> None:
        """What is under way for requests never comes, and the next workers have prepared nothing."""
        for request in self.by_id.values():
            request.num_output_placeholders = 0
        self.preparations.begin()

    def give_back(self, wanted: GiveBack) -> None:
        """Drop what does not run and has not started, so that it may go elsewhere; without workers, what had started too."""
        leaving = (
            (RequestState.WAITING,) if self._workers.rank.serves else (RequestState.WAITING, RequestState.PREEMPTED)
        )
        for request_id in list(self.by_id) if wanted.everything else wanted.request_ids:
            request = self.by_id.get(request_id)
            if request is not None and request.state in leaving:
                num_crashes = request.num_crashes if request.crashed_at >= len(request.tokens) else 0
                self.load.give_back(request.work, request.detokenizer, request.incarnation, num_crashes)
                self.remove(request)
        for one in self.detokenizers.take_early(None if wanted.everything else wanted.request_ids):
            self.load.give_back(one.work, one.detokenizer, one.incarnation, one.work.num_crashes)

    def hand_off(self, request: Request) -> None:
        """It has its first token, and goes on at another rank."""
        self.load.hand_off(request.work, request.detokenizer, request.incarnation)
        self.remove(request)

    def still_there(self, detokenizer: Identity, asked: StillThere) -> list[Send]:
        """Tells a detokenizer which requests are not here, so that it admits them again: a coordinator may have died with that news."""
        here = {r.handle for r in self.by_id.values() if r.detokenizer == detokenizer}
        gone = tuple(Handle(handle) for handle in unpack_i32(asked.handles) if handle not in here)
        return [Send(detokenizer, Readmit(gone))] if gone else []

    def expire(self, wall_s: float, output: Output) -> None:
        late = [request for request in self.by_id.values() if 0 < request.work.deadline_s <= wall_s]
        for request in late:
            self.finish(request, output, FinishReason.ERROR, "the request's timeout passed", ErrorKind.TIMEOUT)

    def attach(self, attach: AttachTokens, output: Output) -> None:
        for request in self.by_id.values():
            if request.work.handle == attach.handle:
                known = request.output_from(attach.from_index)
                output.outbox_of(request.detokenizer).row(attach.handle, attach.from_index, known)

    def check(self, inflight: Collection[Inflight], most: int) -> None:
        """AssertionError where the requests contradict the queues or the steps in flight, `most` of which there may be."""
        queued = [*self.batching.running, *self.batching.waiting]
        assert {id(r) for r in queued} == {id(r) for r in self.by_id.values()}, "the queues are not all requests"
        assert len(inflight) <= most
        assert self.load.live_tokens == sum(len(r.tokens) - r.num_given for r in self.by_id.values())
        owed: dict[int, int] = {}
        for record in inflight:
            samples = record.samples or b"\x01" * len(record.batch)
            num_drafts = record.num_drafts or [0] * len(record.batch)
            for request, sampled, drafted in zip(record.batch, samples, num_drafts, strict=True):
                owed[id(request)] = owed.get(id(request), 0) + sampled + drafted
        for request in self.by_id.values():
            assert request.num_output_placeholders == owed.get(id(request), 0), (
                "tokens in flight differ from what was sent"
            )
            assert len(request.tokens) + request.num_output_placeholders <= request.max_len, "more tokens than allowed"


def _constraint(work: EngineRequest) -> str:
    """The name that the client gave to what leaves the fewest tokens; empty: nothing is left out."""
    params = work.sampling
    if name := next((extra.constraint for extra in work.extras if extra.constraint), ""):
        return name
    said = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
        "vllm_xargs": params.extra_args,
        "logit_bias": params.logit_bias,
        "min_tokens": params.min_tokens,
    }
    return next((name for name, value in said.items() if value), "")
