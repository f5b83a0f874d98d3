"""Attempts: which scheduler computes each request of the journal, and where it goes on when processes die. Pure.

Owned by core.py, which decodes the tokens. Knows the incarnations of schedulers and the coordinator, and says all that is said to the
coordinator: Admit and AbortRequests. The journal keeps the requests.
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from meshlm.detokenizer.aborts import Aborts
from meshlm.detokenizer.events import Effect
from meshlm.detokenizer.incarnations import Incarnations
from meshlm.detokenizer.journal import Journal
from meshlm.detokenizer.leases import digests_of
from meshlm.detokenizer.request_state import REPETITION_DETECTED, RequestState
from meshlm.detokenizer.states import RequestStatus
from meshlm.protocol.edges.admit import AbortRequests, Admit, Readmit, Routed, SchedulerIncarnation
from meshlm.protocol.edges.token import Disown, StillThere
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, FinishReason, Identity, RequestId, Role
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.deaths import MAX_DEATHS, one_more, poison, too_many
from meshlm.runtime.process.events import PeerLost, PeerUp, Send
from meshlm.runtime.process.in_hand import short

MEDIA_GONE = "the file of one of the request's images is gone from the host's shared memory; send the request again"


class Attempts:
    """A death begins a new attempt of each request that it concerns."""

    max_deaths = MAX_DEATHS  # of schedulers, or of the coordinator, after which a request is given up

    def __init__(self, journal: Journal, counts: Counts) -> None:
        self._journal, self._counts = journal, counts
        self._incarnations = Incarnations()
        self._aborts = Aborts()
        self._spares: dict[Identity, bool] = {}  # whether it is known what its last incarnation died of

    # --- one attempt ---

    def admit(self, request: RequestState) -> list[Effect]:
        """Send the request towards a scheduler, unless the ids that exist already end it."""
        request.move(RequestStatus.UNASKED)
        self._journal.by_handle[request.handle] = request
        if request.matched_stop is not None:
            return self._end(request, FinishReason.STOP, request.matched_stop)
        sampling, last = request.sampling, request.output_token_ids[-1:]
        if {*last} & {*sampling.eos_token_ids, *sampling.stop_token_ids}:
            return self._end(request, FinishReason.STOP)
        if len(request.output_token_ids) >= sampling.max_tokens:
            return self._end(request, FinishReason.LENGTH)
        if request.repeats:
            return self._end(request, FinishReason.REPETITION, REPETITION_DETECTED)
        if request.lacks_media:
            return self._end(request, FinishReason.ERROR, None, MEDIA_GONE, ErrorKind.OVERLOADED)
        return self._ask(request)

    def _ask(self, request: RequestState) -> list[Effect]:
        """Ask the coordinator for a rank. While it is away this waits for `up`."""
        if not self._incarnations.coordinator:
            return []
        request.move(RequestStatus.ASKED)
        request.asked, request.asked_at = self._incarnations.coordinator, self._journal.now
        return [Send(COORDINATOR, Admit(request.work(), request.submit.dp_rank, self._incarnations.ended))]

    def routed(self, routed: Routed) -> list[Effect]:
        request = self._journal.by_handle.get(routed.handle)
        if request is None:
            return []
        request.scheduler = SchedulerIncarnation(routed.scheduler, routed.incarnation)
        if request.status is not RequestStatus.HEARD:
            request.move(RequestStatus.ROUTED)
        request.route_s = self._journal.now - request.asked_at
        self._counts.histograms["request_route_time_seconds"].observe(request.route_s)
        return self._leave(routed.scheduler) if self._incarnations.over(routed.scheduler, routed.incarnation) else []

    def heard(self, handle: int, scheduler: SchedulerIncarnation, weights: str) -> None:
        """The first token of an attempt, or of other weights: this scheduler has it, even where the coordinator could not say so."""
        request = self._journal.by_handle.get(handle)
        if request is not None:
            request.move(RequestStatus.HEARD)
            request.scheduler, request.weights = scheduler, weights or request.weights

    def _end(self, request: RequestState, reason: FinishReason, *why: Any) -> list[Effect]:
        """A terminal row of its own. why: see Journal.finish_row."""
        self._journal.finish_row(request, self._journal.row(request, [], ""), reason, *why)
        return []

    def say_abort(self, request_ids: tuple[RequestId, ...]) -> list[Effect]:
        self._aborts.add(request_ids)
        return [Send(COORDINATOR, AbortRequests(request_ids))] if self._incarnations.coordinator else []

    def stranger(self, sender: Identity, handle: int) -> list[Effect]:
        return [Send(sender, Disown(pack_i32([handle])))] if self._aborts.stranger(handle) else []

    def media_gone(self, digests: frozenset[bytes]) -> list[Effect]:
        """The files of these images are gone. What a scheduler has begun goes on with what is computed; what has not, or begins
        again, ends: its worker would read the file."""
        effects: list[Effect] = []
        for request in list(self._journal.by_id.values()):
            if not digests_of(request) & digests:
                continue
            request.lacks_media = True
            if request.status in (RequestStatus.UNASKED, RequestStatus.ASKED, RequestStatus.ROUTED):
                self._end(request, FinishReason.ERROR, None, MEDIA_GONE, ErrorKind.OVERLOADED)
                effects += self.say_abort((request.work_id,))
        return effects

    # --- incarnations and deaths ---

    def up(self, event: PeerUp) -> list[Effect]:
        was_lost = SchedulerIncarnation(event.identity, event.incarnation) in self._incarnations.ended
        self._incarnations.up(event.identity, event.incarnation)
        if event.identity == COORDINATOR:
            aborted = self._aborts.to_repeat({request.work_id for request in self._journal.by_id.values()})
            effects: list[Effect] = [Send(COORDINATOR, AbortRequests(aborted))] if aborted else []
            effects += [effect for s in list(self._journal.by_handle.values()) for effect in self._ask_anew(s)]
            return effects + self._ask_schedulers(self._journal.by_handle.values())
        return self._leave(event.identity) + (self._ask_for_waiting() if was_lost else [])

    def _ask_for_waiting(self) -> list[Effect]:
        """A rank was only out of reach: what waits, and was to avoid it, may go there again; its last attempt may be on its way."""
        waiting = [request for request in self._journal.by_handle.values() if request.scheduler is None]
        return [effect for request in waiting for effect in self._next_attempt(request, "rank_back")]

    def rank_lost(self, lost: SchedulerIncarnation) -> list[Effect]:
        """The coordinator cannot reach it, even if we can: what it has not answered may never have come to it."""
        there = [request for request in self._journal.by_handle.values() if request.scheduler == lost]
        heard = [request for request in there if request.status is RequestStatus.HEARD]
        unheard = (request for request in there if request.status is RequestStatus.ROUTED)
        effects = [effect for request in unheard for effect in self._admit_again(request)]
        return effects + self._ask_schedulers(heard)

    def _ask_schedulers(self, requests: Iterable[RequestState]) -> list[Effect]:
        """Asks schedulers whether they still have these requests: a coordinator may have died before it told of some."""
        found: dict[Identity, list[int]] = {}
        for request in requests:
            if request.status is RequestStatus.HEARD and request.scheduler is not None:
                found.setdefault(request.scheduler.scheduler, []).append(request.handle)
        return [Send(scheduler, StillThere(pack_i32(handles))) for scheduler, handles in found.items()]

    def _ask_anew(self, request: RequestState) -> list[Effect]:
        """A new incarnation of the coordinator knows of no request. One that no scheduler has answered may have been lost."""
        if request.status is RequestStatus.HEARD:
            return []
        if request.status is RequestStatus.UNASKED:
            return self._ask(request)
        if request.scheduler is None:
            return self._admit_again(request)
        request.asked = self._incarnations.coordinator
        rank = request.scheduler.scheduler.index
        return [Send(COORDINATOR, Admit(request.work(), rank, self._incarnations.ended, again=True))]

    def lost(self, event: PeerLost) -> list[Effect]:
        """The coordinator or a scheduler died, or cannot be reached."""
        self._incarnations.lost(event.identity, event.incarnation)
        self._spares[event.identity] = bool(event.in_hand)
        return self._blame(event.identity.role, event.in_hand) + self._leave(event.identity)

    def _blame(self, role: Role, in_hand: tuple[str, ...]) -> list[Effect]:
        """A process died with these in hand. What two die of is refused, as its client sent it: with all choices of the prompt."""
        if not in_hand:
            return []
        named = [request for request in self._journal.by_handle.values() if short(request.work_id) in in_hand]
        prompts = {request_id for request in named for request_id in request.submit.request_ids}
        effects: list[Effect] = []
        for request in [request for request in self._journal.by_handle.values() if request.request_id in prompts]:
            request.num_in_hand += 1
            if text := poison(role, request.num_in_hand):
                self._end(request, FinishReason.ERROR, None, text, ErrorKind.POISON)
                effects += self.say_abort((request.work_id,))
        return effects

    def _leave(self, scheduler: Identity) -> list[Effect]:
        """Requests of this scheduler's earlier incarnations go on elsewhere."""
        effects: list[Effect] = []
        for request in list(self._journal.by_handle.values()):
            if (placed := request.scheduler) is None or placed.scheduler != scheduler:
                continue
            if self._incarnations.over(scheduler, placed.incarnation):
                self._incarnations.lost(scheduler, placed.incarnation)  # the coordinator is told, who may not know
                effects += self._admit_again(request)
        return effects

    def readmit(self, readmit: Readmit) -> list[Effect]:
        """Admits a request again that its rank gave back. No attempt has failed; its count of crashed workers goes with it."""
        effects: list[Effect] = []
        reason = "handed_off" if readmit.handed_off else "given_back"
        for handle, num_crashes in zip_longest(readmit.handles, readmit.num_crashes, fillvalue=0):
            request = self._journal.by_handle.get(handle)
            if request is not None:
                request.num_crashes, request.crashed_at = num_crashes, len(request.output_token_ids)
                effects += self._next_attempt(request, reason)
        return effects

    def _admit_again(self, request: RequestState) -> list[Effect]:
        """Go on from the journal after a death: of a scheduler that had it, or of the coordinator while it had it."""
        role = Role.COORDINATOR if request.scheduler is None else Role.SCHEDULER
        died = COORDINATOR if request.scheduler is None else request.scheduler.scheduler
        before = () if len(request.output_token_ids) > request.begun_with else request.deaths
        request.deaths = before if self._spares.get(died) else one_more(before, role, self._journal.now)
        request.begun_with = len(request.output_token_ids)
        if text := too_many(request.deaths, self.max_deaths):
            return self._end(request, FinishReason.ERROR, None, text)
        return self._next_attempt(request, f"{role.value}_lost")

    def _next_attempt(self, request: RequestState, reason: str) -> list[Effect]:
        """Under a new handle, so that late tokens find nobody."""
        self._counts.add("request_retries", reason)
        request.retried.append((self._journal.now, reason))
        del self._journal.by_handle[request.handle]
        request.attempt += 1
        request.handle = self._journal.new_handle()
        request.scheduler = None
        return self.admit(request)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for handle, request in self._journal.by_handle.items():
            assert request.handle == handle
            assert self._journal.by_id.get(request.request_id) is request, "admitted, and not in the journal"
            assert len(request.output_token_ids) <= request.sampling.max_tokens, "more tokens than allowed"
            placed, heard = request.scheduler, request.status is RequestStatus.HEARD
            dead = placed is not None and self._incarnations.over(placed.scheduler, placed.incarnation)
            assert not dead, "left with a dead scheduler"
            asked = request.asked == self._incarnations.coordinator or not self._incarnations.coordinator
            assert heard or asked, "nobody was asked"
