"""The detokenizer's pure core: the journal of requests, and what each message means for it.

The journal is what survives a scheduler: prompt, sampling parameters and emitted ids of every request admitted here. `handle(event)`
answers with effects; `batches()` gives the text that piled up. Called by io.py.
"""

from array import array

from meshlm.detokenizer.admission import checked_prompt, checked_sampling
from meshlm.detokenizer.batch import FrontendBatch, positions
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event, PeerLost, PeerUp, Received, Send
from meshlm.detokenizer.stream import Stream, StreamState
from meshlm.protocol.admit_edge import AbortRequests, Admit, Refused, Routed
from meshlm.protocol.columns import unpack_i32
from meshlm.protocol.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.text_edge import (
    Abort,
    Accepted,
    Attach,
    Detokenize,
    DetokenizeReply,
    Finished,
    Rejected,
    Submit,
    Tokenize,
    TokenizeReply,
)
from meshlm.protocol.token_edge import AttachTokens, Ended, TokenDeltas
from meshlm.runtime.errors import RequestError

COORDINATOR = Identity(Role.COORDINATOR, 0)
MAX_ATTEMPTS = 5


class Detokenizer:
    """See the module docstring."""

    def __init__(self, table: TokenTable, vocab_size: int, max_model_len: int) -> None:
        self.table, self.vocab_size, self.max_model_len = table, vocab_size, max_model_len
        self.by_handle: dict[int, Stream] = {}
        self.by_id: dict[RequestId, Stream] = {}
        self.jobs: dict[int, list[Stream] | tuple[Identity, Tokenize]] = {}
        self._next_job = 0
        self._next_handle = 0
        self._batches: dict[Identity, FrontendBatch] = {}
        self.num_tokens = 0

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case Received(message=TokenDeltas() as deltas):
                return self._tokens(event.sender, deltas)
            case Received():
                return self._received(event)
            case Encoded():
                return self._encoded(event)
            case PeerLost():
                return self._lost(event)
            case PeerUp():
                return []

    def batches(self) -> list[Send]:
        """One message for each frontend that has news."""
        sends = [Send(frontend, batch.message()) for frontend, batch in self._batches.items()]
        self._batches = {}
        return sends

    def _received(self, event: Received) -> list[Effect]:
        match event.message:
            case Submit() as submit:
                return self._submit(submit, event.sender, event.incarnation)
            case Abort() as abort:
                return self._abort(abort.request_ids)
            case Attach() as attach:
                return self._attach(attach, event.sender, event.incarnation)
            case Tokenize() as tokenize:
                self._next_job += 1
                self.jobs[self._next_job] = (event.sender, tokenize)
                return [Encode(self._next_job, tokenize.prompt)]
            case Detokenize() as detokenize:
                return [Send(event.sender, self._detokenized(detokenize))]
            case Routed() as routed:
                stream = self.by_handle.get(routed.handle)
                if stream is not None:
                    stream.scheduler, stream.scheduler_incarnation = routed.scheduler, routed.incarnation
            case Refused() as refused:
                return self._refused(refused)
        return []

    # --- prompts ---

    def _submit(self, submit: Submit, sender: Identity, incarnation: Incarnation) -> list[Effect]:
        streams = []
        for choice, request_id in enumerate(submit.request_ids):
            known = self.by_id.get(request_id)
            if known is not None:
                if known.submit.attempt >= submit.attempt:
                    continue  # a repetition
                self._forget(known)
            stream = Stream(submit, choice, sender, incarnation, self._new_handle())
            self.by_id[request_id] = stream
            streams.append(stream)
        if not streams:
            return []
        self._next_job += 1
        self.jobs[self._next_job] = streams
        return [Encode(self._next_job, submit.prompt)]

    def _new_handle(self) -> Handle:
        self._next_handle = self._next_handle % 0x7FFF_FFFF + 1
        return Handle(self._next_handle)

    def _encoded(self, event: Encoded) -> list[Effect]:
        job = self.jobs.pop(event.job)
        if isinstance(job, tuple):
            return [Send(job[0], self._tokenized(job[1], event))]
        streams = [stream for stream in job if self.by_id.get(stream.request_id) is stream]
        if not streams:
            return []
        submit = streams[0].submit
        try:
            if event.error is not None:
                raise event.error
            assert event.token_ids is not None
            prompt = checked_prompt(event.token_ids, submit, self.vocab_size, self.max_model_len)
            sampling = [
                checked_sampling(submit, submit.request_ids.index(s.request_id), len(prompt), self.max_model_len)
                for s in streams
            ]
        except RequestError as error:
            for stream in streams:
                self._forget(stream)
            handles = tuple(stream.frontend_handle for stream in streams)
            return [Send(streams[0].frontend, Rejected(handles, error.kind, error.message, error.param))]
        effects: list[Effect] = [Send(streams[0].frontend, self._accepted(streams, prompt))]
        for stream, params in zip(streams, sampling, strict=True):
            stream.begin(self.table, prompt, params)
            effects += self._admit(stream)
        return effects

    def _accepted(self, streams: list[Stream], prompt: "array[int]") -> Accepted:
        handles = tuple(stream.frontend_handle for stream in streams)
        if not streams[0].submit.want_prompt:
            return Accepted(handles, len(prompt))
        shown = tuple(self.table.show(token)[0] for token in prompt)
        text = self.table.tokenizer.decode(list(prompt), skip_special_tokens=False)
        return Accepted(handles, len(prompt), prompt.tobytes(), text, shown)

    def _admit(self, stream: Stream) -> list[Effect]:
        """Send the request towards a scheduler, unless the ids that exist already end it."""
        stream.state = StreamState.ADMITTED
        self.by_handle[stream.handle] = stream
        if stream.stop is not None and stream.stop.matched is not None:
            return self._end(stream, FinishReason.STOP, stop_reason=stream.stop.matched)
        if stream.emitted and stream.emitted[-1] in {*stream.sampling.eos_token_ids, *stream.sampling.stop_token_ids}:
            return self._end(stream, FinishReason.STOP)
        if len(stream.emitted) >= stream.sampling.max_tokens:
            return self._end(stream, FinishReason.LENGTH)
        return [Send(COORDINATOR, Admit(stream.work(), stream.submit.dp_rank))]

    def _end(self, stream: Stream, reason: FinishReason, stop_reason: str | int | None = None) -> list[Effect]:
        """A terminal row of its own."""
        self._finish_row(stream, self._row(stream, [], ""), reason, stop_reason)
        return []

    def _tokenized(self, ask: Tokenize, event: Encoded) -> TokenizeReply:
        if event.error is not None:
            return TokenizeReply(ask.handle, error=event.error.message, param=event.error.param)
        assert event.token_ids is not None
        strings = tuple(self.table.show(token)[0] for token in event.token_ids) if ask.want_strings else ()
        return TokenizeReply(ask.handle, event.token_ids.tobytes(), strings, self.max_model_len)

    def _detokenized(self, ask: Detokenize) -> DetokenizeReply:
        ids = unpack_i32(ask.token_ids).tolist()
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            text = f"token id {bad} is outside the vocabulary 0..{self.vocab_size - 1}"
            return DetokenizeReply(ask.handle, error=text, param="tokens")
        return DetokenizeReply(ask.handle, self.table.tokenizer.decode(ids, skip_special_tokens=False))

    # --- tokens ---

    def _tokens(self, sender: Identity, deltas: TokenDeltas) -> list[Effect]:
        handles, starts, tokens = unpack_i32(deltas.handles), unpack_i32(deltas.starts), unpack_i32(deltas.token_ids)
        counts = unpack_i32(deltas.counts) if deltas.counts else None
        if counts is None and not (
            deltas.ended or deltas.logprobs or deltas.prompt_logprobs or deltas.num_cached_tokens
        ):
            return self._plain_tokens(sender, deltas, handles, starts, tokens)
        ended = {end.row: end for end in deltas.ended}
        effects: list[Effect] = []
        at = 0
        for row, handle in enumerate(handles):
            count = 1 if counts is None else counts[row]
            stream = self.by_handle.get(handle)
            if stream is not None:
                have, start = len(stream.emitted), starts[row]
                if start > have:
                    effects.append(Send(sender, AttachTokens(stream.handle, have)))
                elif start + count > have or (row in ended and start + count == have):
                    new = tokens[at + have - start : at + count]
                    effects += self._new_tokens(stream, new, ended.get(row), row, deltas)
            at += count
        return effects

    def _plain_tokens(
        self, sender: Identity, deltas: TokenDeltas, handles: memoryview, starts: memoryview, tokens: memoryview
    ) -> list[Effect]:
        """A step of nothing but decodes: the hot loop. What needs more than a table look-up goes the general way."""
        effects: list[Effect] = []
        by_handle, batches = self.by_handle, self._batches
        frontend: Identity | None = None
        batch: FrontendBatch | None = None
        for row, handle in enumerate(handles):
            stream = by_handle.get(handle)
            if stream is None:
                continue
            have, start = len(stream.emitted), starts[row]
            if start != have or stream.stop is not None:
                if start > have:
                    effects.append(Send(sender, AttachTokens(stream.handle, have)))
                elif start == have:
                    effects += self._new_tokens(stream, tokens[row : row + 1], None, row, deltas)
                continue
            if stream.frontend is not frontend:
                frontend = stream.frontend
                batch = batches.get(frontend)
                if batch is None:
                    batch = batches[frontend] = FrontendBatch()
            assert batch is not None
            assert stream.decoder is not None
            token = tokens[row]
            stream.emitted.append(token)
            batch.token(stream, have, token, stream.decoder.push(token))
        self.num_tokens += len(handles)
        if deltas.timings_ns and batch is not None:
            batch.timings = deltas.timings_ns
        return effects

    def _new_tokens(
        self, stream: Stream, new: memoryview, ended: Ended | None, row: int, deltas: TokenDeltas
    ) -> list[Effect]:
        """Decode, look for stop strings, add a row to the frontend's batch."""
        self.num_tokens += len(new)
        kept = 0
        text = ""
        stop = stream.stop
        for token in new:
            kept += 1
            if ended is not None and kept == len(new) and stream.hides(ended):
                text += stream.push_silent(token)
            else:
                text += stream.push(token)
            if stop is not None and stop.matched is not None:
                break
        taken = new[:kept].tolist()
        stopped = stop is not None and stop.matched is not None
        if ended is not None and not stopped:
            text += stream.finish()
            stopped = stop is not None and stop.matched is not None
        place = self._row(stream, taken, text)
        self._details(stream, place, taken, row, deltas)
        if stopped:
            assert stop is not None
            self._finish_row(stream, place, FinishReason.STOP, stop.matched)
            return [] if ended is not None else [Send(COORDINATOR, AbortRequests((stream.request_id,)))]
        if ended is not None:
            self._finish_row(stream, place, ended.reason, stream.stop_reason(ended), ended.message, ended.kind)
        return []

    def _row(self, stream: Stream, taken: list[int], text: str) -> int:
        batch = self._batches.get(stream.frontend)
        if batch is None:
            batch = self._batches[stream.frontend] = FrontendBatch()
        stream.batch = None
        return batch.row(stream.frontend_handle, len(stream.emitted) - len(taken), taken, text)

    def _details(self, stream: Stream, place: int, taken: list[int], row: int, deltas: TokenDeltas) -> None:
        """What few rows have: logprobs, cached prompt tokens."""
        batch = self._batches[stream.frontend]
        if deltas.timings_ns:
            batch.timings = deltas.timings_ns
        if row in deltas.num_cached_tokens:
            batch.cached[place] = deltas.num_cached_tokens[row]
        if row in deltas.logprobs:
            batch.logprobs[place] = positions(deltas.logprobs[row], taken, self.table)
        if row in deltas.prompt_logprobs:
            of_prompt = positions(deltas.prompt_logprobs[row], stream.prompt[1:], self.table)
            batch.prompt_logprobs[place] = [None, *of_prompt]

    def _finish_row(
        self,
        stream: Stream,
        place: int,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        message: str = "",
        kind: ErrorKind = ErrorKind.INTERNAL,
    ) -> None:
        finished = Finished(place, reason, stop_reason, len(stream.emitted), message, kind)
        self._batches[stream.frontend].finished.append(finished)
        self._forget(stream)

    def _refused(self, refused: Refused) -> list[Effect]:
        stream = self.by_handle.get(refused.handle)
        if stream is None:
            return []
        self._forget(stream)
        return [Send(stream.frontend, Rejected((stream.frontend_handle,), refused.kind, refused.message))]

    # --- ends ---

    def _forget(self, stream: Stream) -> None:
        self.by_handle.pop(stream.handle, None)
        if self.by_id.get(stream.request_id) is stream:
            del self.by_id[stream.request_id]

    def _abort(self, request_ids: tuple[RequestId, ...]) -> list[Effect]:
        gone = [stream for request_id in request_ids if (stream := self.by_id.get(request_id)) is not None]
        for stream in gone:
            self._forget(stream)
        admitted = tuple(stream.request_id for stream in gone if stream.state is StreamState.ADMITTED)
        return [Send(COORDINATOR, AbortRequests(admitted))] if admitted else []

    def _attach(self, attach: Attach, sender: Identity, incarnation: Incarnation) -> list[Effect]:
        """Another frontend, or the same one after a gap, wants a stream from `from_index` on."""
        stream = self.by_id.get(attach.request_id)
        if stream is None or stream.state is not StreamState.ADMITTED:
            gone = Rejected((attach.handle,), ErrorKind.NOT_FOUND, f"request {attach.request_id} is not known here")
            return [Send(sender, gone)]
        stream.frontend, stream.frontend_incarnation = sender, incarnation
        stream.frontend_handle = attach.handle
        again = stream.emitted[attach.from_index :]
        before = self.table.decoder(stream.submit.text.skip_special_tokens)
        for token in stream.emitted[: attach.from_index]:
            before.push(token)
        text = "".join(before.push(token) for token in again)
        self._row(stream, again.tolist(), text)
        return []

    def _lost(self, event: PeerLost) -> list[Effect]:
        if event.identity.role is Role.FRONTEND:
            ids = tuple(
                s.request_id
                for s in self.by_id.values()
                if s.frontend == event.identity and s.frontend_incarnation == event.incarnation
            )
            self._batches.pop(event.identity, None)
            return self._abort(ids)
        if event.identity.role is not Role.SCHEDULER:
            return []
        effects: list[Effect] = []
        for stream in list(self.by_handle.values()):
            if stream.scheduler == event.identity and stream.scheduler_incarnation == event.incarnation:
                effects += self._admit_again(stream)
        return effects

    def _admit_again(self, stream: Stream) -> list[Effect]:
        """Its scheduler died: go on from the journal, under a new handle so that late tokens find nobody."""
        del self.by_handle[stream.handle]
        if stream.attempt - stream.submit.attempt + 1 >= MAX_ATTEMPTS:
            self.by_handle[stream.handle] = stream
            place = self._row(stream, [], "")
            self._finish_row(stream, place, FinishReason.ERROR, None, f"its scheduler died {MAX_ATTEMPTS} times")
            return []
        stream.attempt += 1
        stream.handle = self._new_handle()
        stream.scheduler = None
        return self._admit(stream)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for handle, stream in self.by_handle.items():
            assert stream.handle == handle
            assert self.by_id.get(stream.request_id) is stream, "an admitted stream that is not in the journal"
            assert len(stream.emitted) <= stream.sampling.max_tokens, "more tokens than allowed"
        for stream in self.by_id.values():
            assert (stream.state is StreamState.ADMITTED) == (self.by_handle.get(stream.handle) is stream)
