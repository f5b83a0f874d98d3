"""The journal: the requests of this detokenizer, which connection has each, and the rows that pile up for the frontends. Pure.

Owned by core.py; attempts.py, which decides where a request runs, changes it too. It keeps, replays and forgets.
"""

from meshlm.detokenizer import replies
from meshlm.detokenizer.batch import MAX_BATCH_BYTES, FrontendBatch
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect
from meshlm.detokenizer.keyed import PARAM, TAKEN_OVER, Keyed
from meshlm.detokenizer.replay import Replay
from meshlm.detokenizer.request_state import NOBODY, RequestState
from meshlm.detokenizer.states import IN_ATTEMPT, RequestStatus
from meshlm.protocol.edges import text as text_edge
from meshlm.protocol.edges.text import Attach, Detach, Finished, Rejected, Submit
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId
from meshlm.runtime.process.events import Send

KEPT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)  # the ends after which a client may come back


class Journal:
    """The requests, by the coordinator's name and by handle. `now` is the time of the last event."""

    def __init__(self, table: TokenTable, retry_window_s: float) -> None:
        self.table = table
        self.by_handle: dict[int, RequestState] = {}  # those that are admitted
        self.by_id: dict[RequestId, RequestState] = {}
        self.keyed = Keyed(retry_window_s)
        self.now = 0.0
        self._next_handle = 0
        self.open_batches: dict[Identity, FrontendBatch] = {}
        self._full: list[tuple[Identity, FrontendBatch]] = []  # go before those
        self._replays: dict[tuple[Identity, Handle], Replay] = {}  # by connection; the next piece is of the first

    def batches(self, now_ns: int = 0) -> list[Send]:
        """One message for each frontend that has news; more where one would be too long. Called again in the next turn of the loop
        while `tells_again`."""
        self._tell_again()
        full, self._full = self._full, []
        batches, self.open_batches = self.open_batches, {}
        return [Send(to, batch.message(now_ns)) for to, batch in (*full, *batches.items()) if to != NOBODY]

    @property
    def tells_again(self) -> bool:
        """Clients that came back have not been told all yet."""
        return bool(self._replays)

    def new_handle(self) -> Handle:
        self._next_handle = self._next_handle % 0x7FFF_FFFF + 1
        return Handle(self._next_handle)

    def forget(self, request: RequestState) -> None:
        self.by_handle.pop(request.handle, None)
        if self.by_id.get(request.request_id) is request:
            del self.by_id[request.request_id]
            self.keyed.remove(request)
            if request.status is not RequestStatus.FINISHED:  # else its client is told the rest
                self._replays.pop(connection_of(request), None)

    # --- rows ---

    def row(self, request: RequestState, taken: list[int], text: str, *, alone: bool = False) -> int:
        request.batch = None
        batch = self.batch_of(request, alone=alone)
        return batch.row(request.frontend_handle, len(request.output_token_ids) - len(taken), taken, text)

    def batch_of(self, request: RequestState, *, alone: bool = False) -> FrontendBatch:
        """The batch for one more row, which begins it if it is to stand `alone`: what may be long is not to harm what came before."""
        batch = self.open_batches.get(request.frontend)
        if batch is not None and (alone or batch.num_bytes > MAX_BATCH_BYTES):
            self._full.append((request.frontend, batch))
            batch = None
        if batch is None:
            batch = self.open_batches[request.frontend] = FrontendBatch()
        return batch

    def finish_row(
        self,
        request: RequestState,
        row: int,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        message: str = "",
        kind: ErrorKind = ErrorKind.INTERNAL,
        param: str = "",
    ) -> None:
        events, num_tokens = request.events(self.now), len(request.output_token_ids)
        kept = events, bytes(request.drafts), request.kv_transfer
        finished = Finished(row, reason, stop_reason, num_tokens, message, kind, param, *kept)
        self.open_batches[request.frontend].finished.append(finished)
        if request.submit.retry is None or reason not in KEPT:
            self.forget(request)
            return
        del self.by_handle[request.handle]
        request.move(RequestStatus.FINISHED)
        request.finished = finished
        self._keep(request)

    def _keep(self, request: RequestState) -> None:
        """A finished one stays for a client that comes back."""
        for request_id in self.keyed.wait(request, self.now):
            self.forget(self.by_id[request_id])

    def _replay_from(self, request: RequestState, start: int) -> None:
        """Sends the rows from token `start` on again, to the frontend that has the request now."""
        if request.submit.retry is not None:
            if start == len(request.output_token_ids) and request.finished is None:
                return  # nothing yet: a row would only begin the client's stream
            if start == 0 and request.lacks_prompt_logprobs:
                return  # the client's stream begins with them: its frontend sees the gap before the next token, and asks
        self._replays[connection_of(request)] = Replay(request, self.table, start)

    def _tell_again(self) -> None:
        """Tells of each replay in turn again, as much as one turn of the loop has time for."""
        left = text_edge.PIECE_ENTRIES
        while self._replays and left > 0:
            replay = self._replays.pop(to := next(iter(self._replays)))
            left -= self._tell_piece(replay)
            if not replay.is_over:
                self._replays[to] = replay

    def _tell_piece(self, replay: Replay) -> int:
        """About how many entries it had."""
        request, is_first = replay.request, replay.is_first
        if (piece := replay.next_piece()) is None:
            return text_edge.PIECE_ENTRIES
        begin, end, text = piece
        request.batch = None
        batch = self.batch_of(request, alone=is_first and request.prompt_logprobs is not None)
        row = batch.add_replayed_row(request, begin, end, text, self.table)
        request.told_again = end
        if is_first:
            batch.add_first_details(request, row)
        if replay.is_over and request.finished is not None:
            batch.add_end(request, row, request.finished)
        return (end - begin) * (1 + max(0, request.sampling.logprobs))

    # --- connections ---

    def take_over(
        self, request: RequestState, submit: Submit, choice: int, sender: Identity, incarnation: Incarnation
    ) -> list[Effect]:
        """The same request on another connection: that one gets everything, the one before nothing more."""
        handle = submit.handles[choice]
        gone, to = request.frontend_handle, request.frontend
        if to != NOBODY and submit.attempt and submit.arrival_s < request.arrival_s:
            # After this detokenizer's death the older of two connections came second.
            return [Send(sender, Rejected((handle,), ErrorKind.CONFLICT, TAKEN_OVER, PARAM))]
        self._note_told(request)
        effects: list[Effect] = []
        if to != NOBODY and request.status is not RequestStatus.FINISHED:
            effects.append(Send(to, Rejected((gone,), ErrorKind.CONFLICT, TAKEN_OVER, PARAM)))
        num_delivered = len(submit.delivered) // 4
        assert submit.retry is not None
        cuts = submit.retry.cuts
        request.cut = max(num_delivered, cuts[choice] if choice < len(cuts) else 0)
        self._replays.pop(connection_of(request), None)
        request.frontend, request.frontend_incarnation = sender, incarnation
        request.frontend_handle, request.arrival_s = handle, submit.arrival_s
        request.told_again = 0
        self.keyed.back(request)
        if request.status is RequestStatus.ENCODING:
            return effects
        if request.status is RequestStatus.FINISHED:
            self._keep(request)
        request.look_ahead()
        self._replay_from(request, min(num_delivered, len(request.output_token_ids)))
        return [*effects, Send(sender, replies.accepted([request], request.prompt, self.table))]

    def detach(self, detach: Detach, sender: Identity, incarnation: Incarnation) -> list[RequestId]:
        """Unless a newer connection has them. Gives those that are to end for lack of room."""
        gone: list[RequestId] = []
        for request_id, handle in zip(detach.request_ids, detach.handles, strict=False):
            request = self.by_id.get(request_id)
            if request is not None and request.frontend_handle == handle and is_of(request, sender, incarnation):
                gone += self.let_wait(request)
        return gone

    def let_wait(self, request: RequestState) -> list[RequestId]:
        self._note_told(request)
        self._replays.pop(connection_of(request), None)
        request.frontend, request.batch = NOBODY, None
        return [] if request.status is RequestStatus.FINISHED else self.keyed.wait(request, self.now)

    def _note_told(self, request: RequestState) -> None:
        """Notes that a connection has all that there is, so that the next one, which gets it again, does not count it again."""
        if request.frontend != NOBODY:
            replay = self._replays.get(connection_of(request))
            request.num_told = max(request.num_told, len(request.output_token_ids) if replay is None else replay.at)

    def attach(self, attach: Attach, sender: Identity, incarnation: Incarnation) -> list[Effect]:
        """Another frontend, or the same one after a gap, wants a request from `from_index` on."""
        request = self.by_id.get(attach.request_id)
        if request is None or request.status is RequestStatus.ENCODING:
            gone = Rejected((attach.handle,), ErrorKind.NOT_FOUND, f"request {attach.request_id} is not known here")
            return [Send(sender, gone)]
        if request.submit.retry is not None:
            if request.frontend_handle != attach.handle or not is_of(request, sender, incarnation):
                return []  # a newer connection has it
            if connection_of(request) in self._replays or attach.from_index < request.told_again:
                return []  # what it lacks is on its way
        else:
            request.frontend, request.frontend_incarnation = sender, incarnation
            request.frontend_handle = attach.handle
        self._replay_from(request, attach.from_index)
        return []

    def frontend_lost(self, frontend: Identity, incarnation: Incarnation) -> list[RequestId]:
        """A frontend was lost, and its clients with it. Those with an Idempotency-Key may come back; gives the requests that end."""
        lost = [request for request in self.by_id.values() if is_of(request, frontend, incarnation)]
        gone = [request.request_id for request in lost if request.submit.retry is None]
        for request in lost:
            if request.submit.retry is not None:
                gone += self.let_wait(request)
        self.open_batches.pop(frontend, None)
        self._full = [one for one in self._full if one[0] != frontend]
        self._replays = {to: replay for to, replay in self._replays.items() if to[0] != frontend}
        return gone

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.keyed.check()
        for request in self.by_id.values():
            away = request.frontend == NOBODY or request.status is RequestStatus.FINISHED
            assert away == (request.request_id in self.keyed.until), "who waits for a client is not who has none"
            assert (request.status in IN_ATTEMPT) == (self.by_handle.get(request.handle) is request)


def connection_of(request: RequestState) -> tuple[Identity, Handle]:
    return request.frontend, request.frontend_handle


def is_of(request: RequestState, frontend: Identity, incarnation: Incarnation) -> bool:
    """Whether this incarnation of a frontend has the request."""
    return request.frontend == frontend and request.frontend_incarnation == incarnation
