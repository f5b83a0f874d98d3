"""Attempts: which scheduler computes each request of the journal, and where it goes on when processes die. Pure.

A layer between the journal, which keeps the requests, and core.py's Detokenizer, which decodes their tokens. Owns what is known of
the lives of schedulers and the coordinator, and all that is said to the coordinator: Admit and AbortRequests. Never decodes.
"""

from collections.abc import Iterable
from itertools import zip_longest

from meshlm.detokenizer.aborts import Aborts
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect
from meshlm.detokenizer.journal import Journal
from meshlm.detokenizer.lives import Lives
from meshlm.detokenizer.stream import Stream, StreamState
from meshlm.protocol.admit_edge import AbortRequests, Admit, Readmit, Routed, SchedulerLife
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import COORDINATOR, FinishReason, Identity, RequestId, Role
from meshlm.protocol.token_edge import Disown, StillThere
from meshlm.runtime.deaths import MAX_DEATHS, one_more, too_many
from meshlm.runtime.events import PeerLost, PeerUp, Send


class Attempts(Journal):
    """See the module docstring. A death begins a new attempt of each request that it concerns."""

    max_deaths = MAX_DEATHS  # of schedulers, or of the coordinator, after which a request is given up

    def __init__(self, table: TokenTable, retry_window_s: float) -> None:
        super().__init__(table, retry_window_s)
        self._lives = Lives()
        self._aborts = Aborts()

    # --- one attempt ---

    def _admit(self, stream: Stream) -> list[Effect]:
        """Send the request towards a scheduler, unless the ids that exist already end it."""
        stream.state = StreamState.ADMITTED
        self.by_handle[stream.handle] = stream
        if stream.stop is not None and stream.stop.matched is not None:
            return self._end(stream, FinishReason.STOP, stop_reason=stream.stop.matched)
        if stream.output_token_ids and stream.output_token_ids[-1] in {
            *stream.sampling.eos_token_ids,
            *stream.sampling.stop_token_ids,
        }:
            return self._end(stream, FinishReason.STOP)
        if len(stream.output_token_ids) >= stream.sampling.max_tokens:
            return self._end(stream, FinishReason.LENGTH)
        return self._ask(stream)

    def _ask(self, stream: Stream) -> list[Effect]:
        """Ask the coordinator for a rank. While it is away this waits for `_up`."""
        stream.asked = self._lives.coordinator
        if not stream.asked:
            return []
        return [Send(COORDINATOR, Admit(stream.work(), stream.submit.dp_rank, self._lives.ended))]

    def _routed(self, routed: Routed) -> list[Effect]:
        stream = self.by_handle.get(routed.handle)
        if stream is None:
            return []
        stream.scheduler = SchedulerLife(routed.scheduler, routed.incarnation)
        return self._leave(routed.scheduler) if self._lives.over(routed.scheduler, routed.incarnation) else []

    def _heard(self, handle: int, scheduler: SchedulerLife) -> None:
        """The first token of an attempt: this scheduler has it, even where the coordinator died before it said so."""
        stream = self.by_handle.get(handle)
        if stream is not None:
            stream.scheduler, stream.heard = scheduler, True

    def _end(self, stream: Stream, reason: FinishReason, stop_reason: str | int | None = None) -> list[Effect]:
        """A terminal row of its own."""
        self._finish_row(stream, self._row(stream, [], ""), reason, stop_reason)
        return []

    def _say_abort(self, request_ids: tuple[RequestId, ...]) -> list[Effect]:
        self._aborts.said(request_ids)
        return [Send(COORDINATOR, AbortRequests(request_ids))] if self._lives.coordinator else []

    def _stranger(self, sender: Identity, handle: int) -> list[Effect]:
        return [Send(sender, Disown(pack_i32([handle])))] if self._aborts.stranger(handle) else []

    # --- lives and deaths ---

    def _up(self, event: PeerUp) -> list[Effect]:
        was_lost = SchedulerLife(event.identity, event.incarnation) in self._lives.ended
        self._lives.up(event.identity, event.incarnation)
        if event.identity == COORDINATOR:
            aborted = self._aborts.again({stream.work_id for stream in self.by_id.values()})
            effects: list[Effect] = [Send(COORDINATOR, AbortRequests(aborted))] if aborted else []
            effects += [effect for s in list(self.by_handle.values()) for effect in self._ask_anew(s)]
            return effects + self._ask_schedulers(self.by_handle.values())
        return self._leave(event.identity) + (self._ask_for_waiting() if was_lost else [])

    def _ask_for_waiting(self) -> list[Effect]:
        """A rank was only out of reach: what waits, and was to avoid it, may go there again; its last attempt may be on its way."""
        waiting = [stream for stream in self.by_handle.values() if stream.scheduler is None]
        return [effect for stream in waiting for effect in self._next_attempt(stream)]

    def _rank_lost(self, lost: SchedulerLife) -> list[Effect]:
        """The coordinator cannot reach it, even if we can: what it has not answered may never have come to it."""
        unheard = [stream for stream in self.by_handle.values() if stream.scheduler == lost and not stream.heard]
        heard = [stream for stream in self.by_handle.values() if stream.scheduler == lost and stream.heard]
        effects = [effect for stream in unheard for effect in self._admit_again(stream)]
        return effects + self._ask_schedulers(heard)

    def _ask_schedulers(self, streams: Iterable[Stream]) -> list[Effect]:
        """Whether they have them still: that they gave some back, the coordinator may not have lived to say."""
        found: dict[Identity, list[int]] = {}
        for stream in streams:
            if stream.heard and stream.scheduler is not None:
                found.setdefault(stream.scheduler.scheduler, []).append(stream.handle)
        return [Send(scheduler, StillThere(pack_i32(handles))) for scheduler, handles in found.items()]

    def _ask_anew(self, stream: Stream) -> list[Effect]:
        """A new life of the coordinator knows of no request. One that no scheduler has answered may have been lost."""
        if stream.heard:
            return []
        if not stream.asked:
            return self._ask(stream)
        if stream.scheduler is None:
            return self._admit_again(stream)
        stream.asked = self._lives.coordinator
        rank = stream.scheduler.scheduler.index
        return [Send(COORDINATOR, Admit(stream.work(), rank, self._lives.ended, again=True))]

    def _lost(self, event: PeerLost) -> list[Effect]:
        """The coordinator or a scheduler died, or cannot be reached."""
        self._lives.lost(event.identity, event.incarnation)
        return self._leave(event.identity)

    def _leave(self, scheduler: Identity) -> list[Effect]:
        """What lives of this scheduler had that are over goes on elsewhere."""
        effects: list[Effect] = []
        for stream in list(self.by_handle.values()):
            life = stream.scheduler
            if life is not None and life.scheduler == scheduler and self._lives.over(scheduler, life.incarnation):
                self._lives.lost(scheduler, life.incarnation)  # the coordinator is told, who may not know
                effects += self._admit_again(stream)
        return effects

    def _readmit(self, readmit: Readmit) -> list[Effect]:
        """Its rank gave it back: no attempt that failed. What its worker's death counts for goes with it."""
        effects: list[Effect] = []
        for handle, num_crashes in zip_longest(readmit.handles, readmit.num_crashes, fillvalue=0):
            stream = self.by_handle.get(handle)
            if stream is not None:
                stream.num_crashes, stream.crashed_at = num_crashes, len(stream.output_token_ids)
                effects += self._next_attempt(stream)
        return effects

    def _admit_again(self, stream: Stream) -> list[Effect]:
        """Go on from the journal after a death: of a scheduler that had it, or of the coordinator while it had it."""
        role = Role.COORDINATOR if stream.scheduler is None else Role.SCHEDULER
        before = () if len(stream.output_token_ids) > stream.begun_with else stream.deaths
        stream.deaths = one_more(before, role, self.now)
        stream.begun_with = len(stream.output_token_ids)
        if text := too_many(stream.deaths, self.max_deaths):
            self._finish_row(stream, self._row(stream, [], ""), FinishReason.ERROR, None, text)
            return []
        return self._next_attempt(stream)

    def _next_attempt(self, stream: Stream) -> list[Effect]:
        """Under a new handle, so that late tokens find nobody."""
        del self.by_handle[stream.handle]
        stream.attempt += 1
        stream.handle = self._new_handle()
        stream.scheduler, stream.heard = None, False
        return self._admit(stream)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        super().check()
        for handle, stream in self.by_handle.items():
            assert stream.handle == handle
            assert self.by_id.get(stream.request_id) is stream, "an admitted stream that is not in the journal"
            assert len(stream.output_token_ids) <= stream.sampling.max_tokens, "more tokens than allowed"
            life, asked = stream.scheduler, stream.asked
            assert life is None or not self._lives.over(life.scheduler, life.incarnation), "left with a dead scheduler"
            assert stream.heard or asked == self._lives.coordinator or not self._lives.coordinator, "nobody was asked"
