"""The journal: the requests of this detokenizer, which connection has each, and the rows that pile up for the frontends. Pure.

The base of attempts.py, which decides where a request runs, and so of core.py's Detokenizer; this part keeps, replays and forgets.
"""

from itertools import pairwise

from meshlm.detokenizer import replies
from meshlm.detokenizer.batch import MAX_BATCH_BYTES, FrontendBatch
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect
from meshlm.detokenizer.keyed import PARAM, TAKEN_OVER, Keyed
from meshlm.detokenizer.stream import NOBODY, Stream, StreamState
from meshlm.protocol.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId
from meshlm.protocol.text_edge import Attach, Detach, Finished, Rejected, Submit
from meshlm.runtime.events import Send


class Journal:
    """See the module docstring. `now` is the time of the last event."""

    def __init__(self, table: TokenTable, retry_window_s: float) -> None:
        self.table = table
        self.by_handle: dict[int, Stream] = {}  # those that are admitted
        self.by_id: dict[RequestId, Stream] = {}
        self.keyed = Keyed(retry_window_s)
        self.now = 0.0
        self._next_handle = 0
        self._batches: dict[Identity, FrontendBatch] = {}
        self._full: list[tuple[Identity, FrontendBatch]] = []  # go before those

    def batches(self) -> list[Send]:
        """One message for each frontend that has news; more where one would be too long."""
        full, self._full = self._full, []
        batches, self._batches = self._batches, {}
        return [Send(to, batch.message()) for to, batch in (*full, *batches.items()) if to != NOBODY]

    def _new_handle(self) -> Handle:
        self._next_handle = self._next_handle % 0x7FFF_FFFF + 1
        return Handle(self._next_handle)

    def _forget(self, stream: Stream) -> None:
        self.by_handle.pop(stream.handle, None)
        if self.by_id.get(stream.request_id) is stream:
            del self.by_id[stream.request_id]
            self.keyed.remove(stream)

    # --- rows ---

    def _row(self, stream: Stream, taken: list[int], text: str, *, alone: bool = False) -> int:
        stream.batch = None
        batch = self._batch_of(stream, alone=alone)
        return batch.row(stream.frontend_handle, len(stream.output_token_ids) - len(taken), taken, text)

    def _batch_of(self, stream: Stream, *, alone: bool = False) -> FrontendBatch:
        """The batch for one more row, which begins it if it is to stand `alone`: what may be long is not to harm what came before."""
        batch = self._batches.get(stream.frontend)
        if batch is not None and (alone or batch.num_bytes > MAX_BATCH_BYTES):
            self._full.append((stream.frontend, batch))
            batch = None
        if batch is None:
            batch = self._batches[stream.frontend] = FrontendBatch()
        return batch

    def _finish_row(
        self,
        stream: Stream,
        place: int,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        message: str = "",
        kind: ErrorKind = ErrorKind.INTERNAL,
        param: str = "",
    ) -> None:
        finished = Finished(place, reason, stop_reason, len(stream.output_token_ids), message, kind, param)
        self._batches[stream.frontend].finished.append(finished)
        if stream.submit.retry is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._forget(stream)
            return
        del self.by_handle[stream.handle]
        stream.state, stream.finished = StreamState.FINISHED, finished
        self._keep(stream)

    def _keep(self, stream: Stream) -> None:
        """A finished one stays for a client that comes back."""
        for request_id in self.keyed.wait(stream, self.now):
            self._forget(self.by_id[request_id])

    def _again(self, stream: Stream, start: int) -> None:
        """Its rows from token `start` on, to the frontend that has it now."""
        stream.batch = None
        finished = stream.finished
        if stream.submit.retry is not None:
            if start == len(stream.output_token_ids) and finished is None:
                return  # nothing yet: a row would only begin the client's stream
            if start == 0 and stream.lacks_prompt_logprobs:
                return  # the client's stream begins with them: its frontend sees the gap before the next token, and asks
        texts, borders = stream.shown(self.table), stream.borders(start)
        for begin, end in pairwise(borders):
            batch = self._batch_of(stream, alone=begin == start and stream.prompt_logprobs is not None)
            place = batch.again(stream, begin, end, "".join(texts[begin:end]))
            if begin == start:
                batch.of_first_row(stream, place)
            if end == borders[-1] and finished is not None:
                batch.end(stream, place, finished)

    # --- connections ---

    def _take_over(
        self, stream: Stream, submit: Submit, choice: int, sender: Identity, incarnation: Incarnation
    ) -> list[Effect]:
        """The same request on another connection: that one gets everything, the one before nothing more."""
        handle = submit.handles[choice]
        gone, to = stream.frontend_handle, stream.frontend
        if to != NOBODY and submit.attempt and submit.arrival_s < stream.arrival_s:
            # After this detokenizer's death the older of two connections came second.
            return [Send(sender, Rejected((handle,), ErrorKind.CONFLICT, TAKEN_OVER, PARAM))]
        self._note_told(stream)
        effects: list[Effect] = []
        if to != NOBODY and stream.state is not StreamState.FINISHED:
            effects.append(Send(to, Rejected((gone,), ErrorKind.CONFLICT, TAKEN_OVER, PARAM)))
        num_delivered = len(submit.delivered) // 4
        assert submit.retry is not None
        cuts = submit.retry.cuts
        stream.cut = max(num_delivered, cuts[choice] if choice < len(cuts) else 0)
        stream.frontend, stream.frontend_incarnation = sender, incarnation
        stream.frontend_handle, stream.arrival_s = handle, submit.arrival_s
        self.keyed.back(stream)
        if stream.state is StreamState.ENCODING:
            return effects
        if stream.state is StreamState.FINISHED:
            self._keep(stream)
        stream.look_ahead()
        self._again(stream, min(num_delivered, len(stream.output_token_ids)))
        return [*effects, Send(sender, replies.accepted([stream], stream.prompt, self.table))]

    def _detach(self, detach: Detach, sender: Identity, incarnation: Incarnation) -> list[RequestId]:
        """Unless a newer connection has them. Gives those that are to end for lack of room."""
        gone: list[RequestId] = []
        for request_id, handle in zip(detach.request_ids, detach.handles, strict=False):
            stream = self.by_id.get(request_id)
            if stream is not None and stream.frontend_handle == handle and is_of(stream, sender, incarnation):
                gone += self._let_wait(stream)
        return gone

    def _let_wait(self, stream: Stream) -> list[RequestId]:
        self._note_told(stream)
        stream.frontend, stream.batch = NOBODY, None
        return [] if stream.state is StreamState.FINISHED else self.keyed.wait(stream, self.now)

    def _note_told(self, stream: Stream) -> None:
        """Its connection has all that there is; the next one, which gets it again, is not to count it again."""
        if stream.frontend != NOBODY:
            stream.num_told = max(stream.num_told, len(stream.output_token_ids))

    def _attach(self, attach: Attach, sender: Identity, incarnation: Incarnation) -> list[Effect]:
        """Another frontend, or the same one after a gap, wants a stream from `from_index` on."""
        stream = self.by_id.get(attach.request_id)
        if stream is None or stream.state is StreamState.ENCODING:
            gone = Rejected((attach.handle,), ErrorKind.NOT_FOUND, f"request {attach.request_id} is not known here")
            return [Send(sender, gone)]
        if stream.submit.retry is not None:
            if stream.frontend_handle != attach.handle or not is_of(stream, sender, incarnation):
                return []  # a newer connection has it
        else:
            stream.frontend, stream.frontend_incarnation = sender, incarnation
            stream.frontend_handle = attach.handle
        self._again(stream, attach.from_index)
        return []

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.keyed.check()
        for stream in self.by_id.values():
            away = stream.frontend == NOBODY or stream.state is StreamState.FINISHED
            assert away == (stream.request_id in self.keyed.until), "who waits for a client is not who has none"
            assert (stream.state is StreamState.ADMITTED) == (self.by_handle.get(stream.handle) is stream)


def is_of(stream: Stream, frontend: Identity, incarnation: Incarnation) -> bool:
    """Whether this life of a frontend has the stream."""
    return stream.frontend == frontend and stream.frontend_incarnation == incarnation
