"""The detokenizer's pure core: what each message means for the journal of requests, and what their tokens become.

The journal is what survives a scheduler: prompt, sampling parameters and output token ids of every request admitted here.
`handle(event)` answers with effects; `batches()` gives the text that piled up. Called by io.py.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from meshlm.detokenizer import replies
from meshlm.detokenizer.admission import checked_prompt, checked_sampling, left_extras, producible
from meshlm.detokenizer.attempts import Attempts
from meshlm.detokenizer.batch import FrontendBatch, is_long
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event, Truncation
from meshlm.detokenizer.extras import check_audio
from meshlm.detokenizer.journal import Journal
from meshlm.detokenizer.leases import Leases
from meshlm.detokenizer.request_state import NOBODY, RequestState
from meshlm.detokenizer.states import IN_ATTEMPT
from meshlm.protocol.counts import DETOKENIZER
from meshlm.protocol.edges import text as edge
from meshlm.protocol.edges.admit import Admit, RankLost, Readmit, Refused, Routed, SchedulerIncarnation
from meshlm.protocol.edges.media import MediaGone
from meshlm.protocol.edges.text import PositionLogprobs, Rejected, Submit
from meshlm.protocol.edges.token import AttachTokens, Ended, TokenDeltas
from meshlm.protocol.extras import generates
from meshlm.protocol.wire.columns import ints, unpack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send, Tick
from meshlm.runtime.process.in_hand import hold

ADMIT_AT_ONCE = 16  # choices of a prompt: each is an Admit with the prompt's tokens


class Detokenizer:
    """The journal and the attempts of its requests, prompts that are being encoded, and tokens that become text."""

    def __init__(
        self,
        table: TokenTable,
        vocab_size: int,
        max_model_len: int,
        retry_window_s: float = 60.0,
        incarnation: int = 0,
        max_audio_samples: int = 0,
    ) -> None:
        """max_audio_samples: of one request's audio, for a model that transcribes and does nothing else; 0: the model takes none."""
        self.table, self.counts = table, Counts(DETOKENIZER)
        self.journal = Journal(table, retry_window_s)
        self.attempts = Attempts(self.journal, self.counts)
        self._max_audio_samples = max_audio_samples
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._incarnation = incarnation
        self.jobs: dict[int, list[RequestState]] = {}
        self._next_job = 0
        self._leases = Leases(self.journal)
        self._delivered: dict[tuple[Identity, RequestId], list[PositionLogprobs]] = {}  # for Submits to come
        self.num_tokens = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.journal.now = now
        match event:
            case Received(message=TokenDeltas() as deltas):
                return self._tokens(event.sender, event.incarnation, deltas)
            case Received():
                return self._received(event)
            case Encoded():
                return self._encoded(event)
            case PeerLost(identity=Identity(role=Role.FRONTEND)):
                self._delivered = {of: told for of, told in self._delivered.items() if of[0] != event.identity}
                return self._abort(self.journal.frontend_lost(event.identity, event.incarnation))
            case PeerLost():
                return self.attempts.lost(event)
            case PeerUp(identity=Identity(role=Role.MEDIA)):
                return [*self._leases.said(now, at_once=True)]
            case PeerUp():
                return self.attempts.up(event)
            case Tick():
                over = [*self.journal.keyed.over(now), *self.journal.keyed.measure(self.journal.by_id)]
                return [*self._abort(over), *self._leases.said(now)]

    def _received(self, event: Received) -> list[Effect]:
        match event.message:
            case Submit() as submit:
                return self._submit(submit, event.sender, event.incarnation)
            case edge.Delivered() as told:
                self._delivered.setdefault((event.sender, told.request_id), []).extend(told.logprobs)
            case edge.Abort() as abort:
                return self._abort(abort.request_ids)
            case edge.Detach() as detach:
                for request_id in detach.request_ids:  # its client may have left between Delivered and Submit
                    self._delivered.pop((event.sender, request_id), None)
                return self._abort(self.journal.detach(detach, event.sender, event.incarnation))
            case edge.Attach() as attach:
                return self.journal.attach(attach, event.sender, event.incarnation)
            case Routed() as routed:
                return self.attempts.routed(routed)
            case Refused() as refused:
                return self._refused(refused)
            case RankLost() as lost:
                return self.attempts.rank_lost(lost.scheduler)
            case Readmit() as readmit:
                return self.attempts.readmit(readmit)
            case MediaGone(digests=digests):
                return self.attempts.media_gone(frozenset(digests))
        return []

    # --- prompts ---

    def _submit(self, submit: Submit, sender: Identity, incarnation: Incarnation) -> list[Effect]:
        told = self._delivered.pop((sender, submit.request_ids[0]), [])
        if (refused := self.journal.keyed.refusal(submit)) is not None:
            return [Send(sender, refused)]
        if len(told) != submit.num_logprobs:
            text = "log-probabilities of what was delivered already were lost on their way"
            return [Send(sender, Rejected(submit.handles, ErrorKind.INTERNAL, text))]
        requests = []
        effects: list[Effect] = []
        for choice, request_id in enumerate(submit.request_ids):
            known = self.journal.by_id.get(request_id)
            if known is not None:
                if submit.retry is not None:
                    effects += self.journal.take_over(known, submit, choice, sender, incarnation)
                    continue
                if known.submit.attempt >= submit.attempt:
                    continue  # a repetition
                self.journal.forget(known)
            request = RequestState(submit, choice, sender, incarnation, self.journal.new_handle(), told)
            # Other detokenizers, and this one earlier, may have asked for it too: for another connection, or before the frontend's
            # link was lost. What is said of those (an abort, an older attempt) is not of this one.
            if submit.retry is not None or submit.attempt:
                request.work_id = RequestId(f"{request_id}-{self._incarnation:x}-{request.handle}")
            self.journal.by_id[request_id] = request
            self.journal.keyed.add(request)
            requests.append(request)
        if not requests:
            return effects
        for request in requests:
            request.submitted_at = self.journal.now
            if submit.attempt:
                self.counts.add("request_retries", "detokenizer_lost")
        self._next_job += 1
        self.jobs[self._next_job] = requests
        keep, truncation = submit.text.truncate_prompt_tokens, None
        if keep and not generates(submit.extras):
            truncation = Truncation(keep, submit.text.truncation_side)
        asked = (submit.prompt, submit.text.bad_words, submit.extras, truncation)
        return [*effects, Encode(self._next_job, *asked, name=requests[0].request_id, suspect=submit.suspect)]

    def is_wanted(self, job: int) -> bool:
        """Whether somebody waits for this prompt still. Threads ask before they begin."""
        return bool(self._waiting(self.jobs.get(job, ())))

    def _waiting(self, requests: Iterable[RequestState]) -> list[RequestState]:
        return [request for request in requests if self.journal.by_id.get(request.request_id) is request]

    def _encoded(self, event: Encoded) -> list[Effect]:
        """Admits the first of the prompt's choices. While its job is still in `jobs` the event is to come again for the others."""
        requests = self._waiting(self.jobs.pop(event.job))
        if not requests:
            return []
        now, later = requests[:ADMIT_AT_ONCE], requests[ADMIT_AT_ONCE:]
        submit = requests[0].submit
        choices = {request_id: choice for choice, request_id in enumerate(submit.request_ids)}
        try:
            if event.error is not None:
                raise event.error
            assert event.token_ids is not None
            check_audio(event.extras, self._max_audio_samples)
            prompt = checked_prompt(event.token_ids, submit, self.vocab_size, self.max_model_len)
            extras = left_extras(event.extras, len(event.token_ids), len(prompt), submit)
            sampling = [checked_sampling(submit, choices[s.request_id], len(prompt), self.max_model_len) for s in now]
        except RequestError as error:
            for request in requests:
                self.journal.forget(request)
            return [
                Send(frontend, Rejected(tuple(s.frontend_handle for s in mine), error.kind, error.message, error.param))
                for frontend, mine in _by_frontend(requests).items()
            ]
        accepted = {to: replies.accepted(mine, prompt, self.table) for to, mine in _by_frontend(now).items()}
        effects: list[Effect] = [Send(frontend, message) for frontend, message in accepted.items()]
        encode_s = self.journal.now - requests[0].submitted_at
        self.counts.histograms["request_encode_time_seconds"].observe(encode_s)
        banned = producible(event.bad_words, self.vocab_size)
        for request, params in zip(now, sampling, strict=True):
            request.encode_s = encode_s
            request.begin(self.table, prompt, replace(params, bad_words_token_ids=banned), extras)
            effects += self.attempts.admit(request)
        if later:
            self.jobs[event.job] = later
        return effects

    # --- tokens ---

    def _tokens(self, sender: Identity, incarnation: Incarnation, deltas: TokenDeltas) -> list[Effect]:
        """Rows of tokens. One token that needs a table look-up alone, as nearly all, is decoded here; what needs more, by `_known`."""
        handles, starts, tokens = ints(deltas.handles), ints(deltas.starts), ints(deltas.token_ids)
        counts = ints(deltas.counts) if deltas.counts else [1] * len(handles)
        for row, first in deltas.first.items():
            self.attempts.heard(handles[row], SchedulerIncarnation(sender, incarnation), first.weights)
        ended = {end.row: end for end in deltas.ended}
        # Where a vector is, there is an end.
        detailed = {*ended, *deltas.first, *deltas.logprobs, *deltas.prompt_logprobs, *deltas.drafts}
        effects: list[Effect] = []
        by_handle = self.journal.by_handle
        frontend: Identity | None = None
        batch = FrontendBatch()  # of `frontend`
        end = 0
        for row, (handle, start, count) in enumerate(zip(handles, starts, counts, strict=True)):
            begin, end = end, end + count
            request = by_handle.get(handle)
            if request is None:
                effects += self.attempts.stranger(sender, handle) if row not in ended else ()
                continue
            if start != len(request.output_token_ids) or count != 1 or request.slow or row in detailed:
                with hold(request.request_id):
                    effects += self._known(sender, request, start, tokens[begin:end], ended.get(row), row, deltas)
                frontend = None  # that may have begun another batch
                continue
            if request.frontend is not frontend:
                frontend = request.frontend
                batch = self.journal.batch_of(request)
                batch.timings = deltas.timings_ns or batch.timings
            token = tokens[begin]
            batch.token(request, start, token, request.push(token))
            if request.stop is not None and request.stop.matched is not None:
                self.journal.finish_row(request, request.place, FinishReason.STOP, request.stop.matched)
                effects += self.attempts.say_abort((request.work_id,))
        self.num_tokens += len(tokens)
        return effects

    def _known(
        self,
        sender: Identity,
        request: RequestState,
        start: int,
        tokens: list[int],
        ended: Ended | None,
        row: int,
        deltas: TokenDeltas,
    ) -> list[Effect]:
        """A row of a request, from output token `start` on: what is new of it."""
        skip = len(request.output_token_ids) - start
        if skip < 0:
            return [Send(sender, AttachTokens(request.handle, len(request.output_token_ids)))]
        if not skip:
            request.drafts += deltas.drafts.get(row, b"")
        if skip < len(tokens) or (ended is not None and skip == len(tokens)):
            return self._new_tokens(request, tokens[skip:], ended, row, deltas, skip)
        return []

    def _new_tokens(
        self, request: RequestState, new: list[int], ended: Ended | None, row: int, deltas: TokenDeltas, skip: int
    ) -> list[Effect]:
        """Decode, look for stop strings, add a row to the frontend's batch. `skip`: tokens of the row that were here before."""
        before = request.cut - len(request.output_token_ids)
        if 0 < before < len(new):  # two rows
            effects = self._new_tokens(request, new[:before], None, row, deltas, skip)
            if self.journal.by_handle.get(request.handle) is not request:
                return effects
            return effects + self._new_tokens(request, new[before:], ended, row, deltas, skip + before)
        kept, text = 0, ""
        for token in new:
            kept += 1
            if ended is not None and kept == len(new) and request.hides(ended):
                request.hidden = True
                request.output_token_ids.append(token)  # counted, not shown
            else:
                text += request.push(token)
            if request.matched_stop is not None:
                break
        taken = new[:kept]
        if ended is not None and request.matched_stop is None:
            request.tail = request.finish()
            text += request.tail
        request.look_ahead()
        batch_row = self.journal.row(request, taken, text, alone=is_long(deltas, row))
        self.journal.open_batches[request.frontend].details(request, batch_row, kept, skip, row, deltas, self.table)
        if request.matched_stop is not None:
            self.journal.finish_row(request, batch_row, FinishReason.STOP, request.matched_stop)
            return [] if ended is not None else self.attempts.say_abort((request.work_id,))
        if ended is not None:
            stop_reason, request.preempted_us = request.stop_reason(ended), ended.preempted_us
            request.kv_transfer = ended.kv_transfer
            why = (ended.reason, stop_reason, ended.message, ended.kind, ended.param)
            self.journal.finish_row(request, batch_row, *why)
        return []

    def _refused(self, refused: Refused) -> list[Effect]:
        request = self.journal.by_handle.get(refused.handle)
        if request is None:
            return []
        self.journal.forget(request)
        rejected = Rejected((request.frontend_handle,), refused.kind, refused.message, refused.param)
        return [Send(request.frontend, rejected)]

    # --- ends ---

    def too_long(self, to: Identity, message: Struct, text: str) -> list[Effect]:
        """No frame holds this message of ours: the request that it is about ends with an error."""
        match message:
            case Admit(work=work):
                return self._refused(Refused(work.handle, ErrorKind.INTERNAL, text))
            case edge.TokenizeReply(handle=handle):
                return [Send(to, edge.TokenizeReply(handle, error=text, param="prompt"))]
            case edge.DetokenizeReply(handle=handle):
                return [Send(to, edge.DetokenizeReply(handle, error=text, param="tokens"))]
            case edge.Accepted(handles=handles):
                return self._end_at(to, handles, text)
            case edge.TextDeltas():
                return self._end_at(to, [Handle(handle) for handle in unpack_i32(message.handles)], text)
        return []

    def _end_at(self, frontend: Identity, handles: Sequence[Handle], text: str) -> list[Effect]:
        """End the requests that this frontend knows by these handles."""
        gone, mine = set(handles), [one for one in self.journal.by_id.values() if one.frontend == frontend]
        ids = [request.request_id for request in mine if request.frontend_handle in gone]
        return [*self._abort(ids), Send(frontend, Rejected(tuple(gone), ErrorKind.INTERNAL, text))]

    def _abort(self, request_ids: Iterable[RequestId]) -> list[Effect]:
        gone = [request for request_id in request_ids if (request := self.journal.by_id.get(request_id)) is not None]
        for request in gone:
            self.journal.forget(request)
        admitted = tuple(request.work_id for request in gone if request.status in IN_ATTEMPT)
        return self.attempts.say_abort(admitted) if admitted else []

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.journal.check()
        self.attempts.check()


def _by_frontend(requests: list[RequestState]) -> dict[Identity, list[RequestState]]:
    """The choices of one prompt by frontend, nearly always a single one; a client that is away needs no answer."""
    found: dict[Identity, list[RequestState]] = {}
    for request in requests:
        if request.frontend != NOBODY:
            found.setdefault(request.frontend, []).append(request)
    return found
