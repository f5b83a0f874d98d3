"""The journal: the requests of this detokenizer, which connection has each, and the rows that pile up for the frontends. Pure.

The base of attempts.py, which decides where a request runs, and so of core.py's Detokenizer; this part keeps, replays and forgets.
"""

from itertools import pairwise

from meshlm.detokenizer import replies
from meshlm.detokenizer.batch import MAX_BATCH_BYTES, FrontendBatch
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect
from meshlm.detokenizer.keyed import PARAM, TAKEN_OVER, Keyed
from meshlm.detokenizer.request_state import NOBODY, RequestState, RequestStatus
from meshlm.protocol.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId
from meshlm.protocol.text_edge import Attach, Detach, Finished, Rejected, Submit
from meshlm.runtime.events import Send


class Journal:
    """See the module docstring. `now` is the time of the last event."""

    def __init__(self, table: TokenTable, retry_window_s: float) -> None:
        self.table = table
        self.by_handle: dict[int, RequestState] = {}  # those that are admitted
        self.by_id: dict[RequestId, RequestState] = {}
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

    def _forget(self, request: RequestState) -> None:
        self.by_handle.pop(request.handle, None)
        if self.by_id.get(request.request_id) is request:
            del self.by_id[request.request_id]
            self.keyed.remove(request)

    # --- rows ---

    def _row(self, request: RequestState, taken: list[int], text: str, *, alone: bool = False) -> int:
        request.batch = None
        batch = self._batch_of(request, alone=alone)
        return batch.row(request.frontend_handle, len(request.output_token_ids) - len(taken), taken, text)

    def _batch_of(self, request: RequestState, *, alone: bool = False) -> FrontendBatch:
        """The batch for one more row, which begins it if it is to stand `alone`: what may be long is not to harm what came before."""
        batch = self._batches.get(request.frontend)
        if batch is not None and (alone or batch.num_bytes > MAX_BATCH_BYTES):
            self._full.append((request.frontend, batch))
            batch = None
        if batch is None:
            batch = self._batches[request.frontend] = FrontendBatch()
        return batch

    def _finish_row(
        self,
        request: RequestState,
        place: int,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        message: str = "",
        kind: ErrorKind = ErrorKind.INTERNAL,
        param: str = "",
    ) -> None:
        finished = Finished(place, reason, stop_reason, len(request.output_token_ids), message, kind, param)
        self._batches[request.frontend].finished.append(finished)
        if request.submit.retry is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._forget(request)
            return
        del self.by_handle[request.handle]
        request.status, request.finished = RequestStatus.FINISHED, finished
        self._keep(request)

    def _keep(self, request: RequestState) -> None:
        """A finished one stays for a client that comes back."""
        for request_id in self.keyed.wait(request, self.now):
            self._forget(self.by_id[request_id])

    def _again(self, request: RequestState, start: int) -> None:
        """Its rows from token `start` on, to the frontend that has it now."""
        request.batch = None
        finished = request.finished
        if request.submit.retry is not None:
            if start == len(request.output_token_ids) and finished is None:
                return  # nothing yet: a row would only begin the client's stream
            if start == 0 and request.lacks_prompt_logprobs:
                return  # the client's stream begins with them: its frontend sees the gap before the next token, and asks
        texts, borders = request.shown(self.table), request.borders(start)
        for begin, end in pairwise(borders):
            batch = self._batch_of(request, alone=begin == start and request.prompt_logprobs is not None)
            place = batch.again(request, begin, end, "".join(texts[begin:end]))
            if begin == start:
                batch.of_first_row(request, place)
            if end == borders[-1] and finished is not None:
                batch.end(request, place, finished)

    # --- connections ---

    def _take_over(
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
        request.frontend, request.frontend_incarnation = sender, incarnation
        request.frontend_handle, request.arrival_s = handle, submit.arrival_s
        self.keyed.back(request)
        if request.status is RequestStatus.ENCODING:
            return effects
        if request.status is RequestStatus.FINISHED:
            self._keep(request)
        request.look_ahead()
        self._again(request, min(num_delivered, len(request.output_token_ids)))
        return [*effects, Send(sender, replies.accepted([request], request.prompt, self.table))]

    def _detach(self, detach: Detach, sender: Identity, incarnation: Incarnation) -> list[RequestId]:
        """Unless a newer connection has them. Gives those that are to end for lack of room."""
        gone: list[RequestId] = []
        for request_id, handle in zip(detach.request_ids, detach.handles, strict=False):
            request = self.by_id.get(request_id)
            if request is not None and request.frontend_handle == handle and is_of(request, sender, incarnation):
                gone += self._let_wait(request)
        return gone

    def _let_wait(self, request: RequestState) -> list[RequestId]:
        self._note_told(request)
        request.frontend, request.batch = NOBODY, None
        return [] if request.status is RequestStatus.FINISHED else self.keyed.wait(request, self.now)

    def _note_told(self, request: RequestState) -> None:
        """Its connection has all that there is; the next one, which gets it again, is not to count it again."""
        if request.frontend != NOBODY:
            request.num_told = max(request.num_told, len(request.output_token_ids))

    def _attach(self, attach: Attach, sender: Identity, incarnation: Incarnation) -> list[Effect]:
        """Another frontend, or the same one after a gap, wants a request from `from_index` on."""
        request = self.by_id.get(attach.request_id)
        if request is None or request.status is RequestStatus.ENCODING:
            gone = Rejected((attach.handle,), ErrorKind.NOT_FOUND, f"request {attach.request_id} is not known here")
            return [Send(sender, gone)]
        if request.submit.retry is not None:
            if request.frontend_handle != attach.handle or not is_of(request, sender, incarnation):
                return []  # a newer connection has it
        else:
            request.frontend, request.frontend_incarnation = sender, incarnation
            request.frontend_handle = attach.handle
        self._again(request, attach.from_index)
        return []

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        self.keyed.check()
        for request in self.by_id.values():
            away = request.frontend == NOBODY or request.status is RequestStatus.FINISHED
            assert away == (request.request_id in self.keyed.until), "who waits for a client is not who has none"
            assert (request.status is RequestStatus.ADMITTED) == (self.by_handle.get(request.handle) is request)


def is_of(request: RequestState, frontend: Identity, incarnation: Incarnation) -> bool:
    """Whether this incarnation of a frontend has the request."""
    return request.frontend == frontend and request.frontend_incarnation == incarnation
