"""The client's pure core: which caller has been given what.

One `Choice` per request of the mesh, grouped in a `ResponseSink` per request of a caller. Deltas are taken in only at the index that
follows what is there, so nothing is repeated and a gap is asked for again; a choice ends exactly once. Called by mesh_client.py.
"""

from collections import defaultdict

import msgspec

from meshlm.protocol.edges.text import Abort, Accepted, Attach, Detach, Finished, Rejected, Submit, TextDeltas
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Role
from meshlm.runtime.client.placement import Choice, Placement, ResponseSink, RowDetails
from meshlm.runtime.process.deaths import BEGUN_S, MAX_DEATHS, NEW_S, one_more, poison, too_many
from meshlm.runtime.process.events import Send
from meshlm.runtime.process.in_hand import short

DONE = 4  # its index in TextDeltas.timings_ns
DEADLINE_GRACE_S = 1.0  # schedulers look once a second


class EngineCounts:
    """The tokens and intervals of one engine's requests since the metrics were last told."""

    __slots__ = ("intervals", "num_tokens")

    def __init__(self) -> None:
        self.intervals: defaultdict[float, int] = defaultdict(int)  # seconds between tokens -> how often
        self.num_tokens = 0


class RequestTracker:
    max_deaths = MAX_DEATHS  # of its detokenizers, after which a request is given up

    def __init__(self, *, patient: bool = False) -> None:
        self.placement = Placement(patient=patient)
        self.load, self.orphans = self.placement.load, self.placement.orphans
        self.by_handle: dict[int, Choice] = {}
        self.deadlines: dict[ResponseSink, float] = {}  # of open requests that have one (wall clock)
        self.counts: defaultdict[str, EngineCounts] = defaultdict(EngineCounts)  # by engine, for the metrics
        self.begun: list[Choice] = []  # whose first tokens came since the metrics were last told
        self.unaccepted: set[int] = set()  # handles of new choices whose prompts are not encoded yet
        self._next_handle = 0

    def new_handle(self) -> Handle:
        self._next_handle = self._next_handle % 0x7FFF_FFFF + 1
        return Handle(self._next_handle)

    def take_counts(self) -> tuple[list[Choice], dict[str, EngineCounts]]:
        """Gives the counts for the metrics, and begins new ones."""
        taken = self.begun, self.counts
        self.begun, self.counts = [], defaultdict(EngineCounts)
        return taken

    # --- detokenizers come and go ---

    def detokenizer_up(self, identity: Identity) -> list[Send]:
        self.placement.up(identity)
        return self.place()

    def detokenizer_down(self, identity: Identity, now: float, in_hand: tuple[str, ...] = ()) -> list[Send]:
        """A detokenizer was lost: its choices go on at another one, after what their callers have."""
        self.placement.down(identity)
        lost = [choice for choice in self.by_handle.values() if choice.detokenizer == identity]
        refusals = self._blame(lost, in_hand)
        for choice in lost:
            if choice.finished is None:
                self._next_after_death(choice, now, spared=bool(in_hand))
        return refusals + self.place()

    def _blame(self, lost: list[Choice], in_hand: tuple[str, ...]) -> list[Send]:
        """A detokenizer died with these in hand. A caller's request is refused as a whole."""
        sinks = {choice.sink for choice in lost if in_hand and short(choice.submit.request_ids[0]) in in_hand}
        sends: list[Send] = []
        for sink in sinks:
            for choice in sink.choices:
                choice.num_in_hand += 1
                choice.submit = msgspec.structs.replace(choice.submit, suspect=True)
            if text := poison(Role.DETOKENIZER, max(choice.num_in_hand for choice in sink.choices)):
                sends += self._end([one for one in sink.choices if one.finished is None], ErrorKind.POISON, text)
        return [send for send in sends if send.to in self.load]

    def place(self) -> list[Send]:
        """Asks detokenizers for choices that have none, as many as one turn of the loop may have."""
        placed, sends = self.placement.place()
        for choice in placed:
            self._register(choice)
        return sends

    def retry_now(self) -> list[Send]:
        """A patient client's choices that found no room are tried once more."""
        self.placement.retry_now()
        return self.place()

    def not_sent(self, handles: tuple[Handle, ...]) -> None:
        """A patient client's choices, for which their detokenizer's queue had no room: they wait until `retry_now`."""
        for handle in handles:
            self._wait(self.by_handle[handle], looks_now=False)

    def _wait(self, choice: Choice, *, looks_now: bool = True) -> None:
        """Takes it from the detokenizer that did not take it; its attempt has not begun."""
        self.unaccepted.discard(choice.handle)
        if self.by_handle.pop(choice.handle, None) is not None:
            self.placement.ended(choice)
        choice.detokenizer = None
        self.placement.wait(choice, looks_now=looks_now)

    def _next_after_death(self, choice: Choice, now: float, *, spared: bool) -> None:
        """Another attempt for a choice whose detokenizer died, unless that was one death too many. spared: it died of others."""
        self.by_handle.pop(choice.handle, None)
        have = len(choice.token_ids)
        choice.retried += ((now, "detokenizer_lost"),)
        before = () if have > choice.begun_with else choice.deaths
        choice.deaths = before if spared else one_more(before, Role.DETOKENIZER, now)
        choice.begun_with = have
        if text := too_many(choice.deaths, self.max_deaths):
            choice.detokenizer = None
            self._fail(choice, ErrorKind.INTERNAL, text, "")
        else:
            self._next_attempt(choice)

    def _next_attempt(self, choice: Choice) -> None:
        """Has the choice placed once more as its next attempt; the tokens that its caller has count as delivered."""
        self.unaccepted.discard(choice.handle)
        choice.detokenizer, attempt = None, choice.submit.attempt + 1
        choice.handle = self.new_handle()  # late rows of the attempt before are nobody's
        delivered = choice.token_ids.tobytes()
        choice.submit = msgspec.structs.replace(
            choice.submit,
            attempt=attempt,
            delivered=delivered,
            num_logprobs=len(choice.logprobs),
            weights=choice.weights[-1][1] if choice.weights else "",
        )
        self.placement.wait(choice)

    def _register(self, choice: Choice) -> None:
        self.by_handle[choice.handle] = choice
        if not choice.submit.attempt:
            self.unaccepted.add(choice.handle)

    # --- requests ---

    def open(self, choices: list[Choice], submit: Submit) -> list[Send]:
        """Ask for all choices of one prompt; `submit` names them all. If a prompt before it was refused, so is it."""
        if all(choice.finished is not None for choice in choices):
            return []
        if submit.deadline_s:
            self.deadlines[choices[0].sink] = submit.deadline_s
        target = self.placement.target_of_new(submit)
        if target is None:
            for choice in choices:
                self.placement.wait(choice, looks_now=self.placement.patient and self.placement.has_queue)
            return []
        for choice in choices:
            self.placement.assign(choice, target)
            self._register(choice)
        return [Send(target, submit)]

    def close(self, choices: list[Choice]) -> list[Send]:
        """The caller left: end what still runs, or let it go on for one that may ask again."""
        running: dict[Identity, list[Choice]] = {}
        for choice in choices:
            self.deadlines.pop(choice.sink, None)
            if choice.finished is None:
                knows = self.placement.knows_of(choice) or choice.detokenizer
                if knows is not None:
                    running.setdefault(knows, []).append(choice)
                self._forget(choice)
        sends = []
        for to, left in running.items():
            ids = tuple(choice.submit.request_ids[0] for choice in left)
            if left[0].submit.retry is None:
                sends.append(Send(to, Abort(ids)))
            else:
                sends.append(Send(to, Detach(ids, tuple(choice.handle for choice in left))))
        return sends

    def _forget(self, choice: Choice) -> None:
        self.unaccepted.discard(choice.handle)
        self.placement.forget(choice)
        if self.by_handle.pop(choice.handle, None) is not None:
            self.placement.ended(choice)

    # --- answers ---

    def accepted(self, message: Accepted, now: float = 0.0) -> None:
        self.unaccepted.difference_update(message.handles)
        for index, handle in enumerate(message.handles):
            choice = self.by_handle.get(handle)
            if choice is not None:
                choice.num_told = message.num_told[index] if message.num_told else 0
                choice.num_prompt_tokens = message.num_prompt_tokens
                choice.accepted_at = choice.accepted_at or now
                if (retry := choice.submit.retry) is not None:  # for its detokenizer's next incarnation
                    retry = msgspec.structs.replace(retry, begun_s=message.arrival_s)
                    choice.submit = msgspec.structs.replace(choice.submit, retry=retry)
                choice.sink.accepted(choice, message)

    def rejected(self, message: Rejected) -> list[Send]:
        sends: list[Send] = []
        for handle in message.handles:
            choice = self.by_handle.get(handle)
            if choice is None:
                continue
            if message.kind is not ErrorKind.OVERLOADED:
                self._fail(choice, message.kind, message.message, message.param)
            elif self.placement.patient:
                self._wait(choice)
                self.placement.refused()
            else:
                sends += self._refused(choice, message)
        return sends + self.place()

    def _refused(self, choice: Choice, message: Rejected) -> list[Send]:
        """There is no room for it. An HTTP request is let in or refused as a whole: by what became of the first of its choices."""
        sink = choice.sink
        if sink.has_begun and not choice.submit.attempt:
            self._forget(choice)
            self._next_attempt(choice)  # which has its place
            return []
        self._fail(choice, message.kind, message.message, message.param)
        if sink.has_begun:
            return []
        return self._end([mate for mate in sink.choices if mate.finished is None], message.kind, message.message)

    def _fail(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        self._forget(choice)
        choice.finished = Finished(0, FinishReason.ERROR, None, len(choice.token_ids), message, kind)
        choice.sink.failed(choice, kind, message, param)

    def expire_orphans(self, now: float) -> None:
        """Ends orphans for which no detokenizer came in time, which begins with the first call that finds an orphan."""
        late: list[Choice] = []
        for choice in self.orphans:
            choice.orphan_since = choice.orphan_since or now
            if now - choice.orphan_since > _patience_s(choice) and self.placement.target(choice.submit) is None:
                late.append(choice)
        for choice in late:
            self._fail(choice, ErrorKind.OVERLOADED, f"no detokenizer was there for {_patience_s(choice):.0f} s", "")

    def expire(self, wall_s: float) -> list[Send]:
        """End what is past its deadline (wall clock), whoever should have said so and is stuck or dead. A little later than its
        scheduler would. One look at each request, however many choices it has."""
        late = [sink for sink, deadline_s in self.deadlines.items() if deadline_s <= wall_s - DEADLINE_GRACE_S]
        for sink in late:
            del self.deadlines[sink]
        ended = [choice for sink in late for choice in sink.choices if choice.finished is None]
        return self._end(ended, ErrorKind.TIMEOUT, "the request's timeout passed")

    def end_all(self, message: str) -> list[Send]:
        """This process stops, and what is still open, or not asked for yet, has had its time."""
        sinks = dict.fromkeys(choice.sink for choice in [*self.by_handle.values(), *self.orphans])
        open_choices = [choice for sink in sinks for choice in sink.choices if choice.finished is None]
        return self._end(open_choices, ErrorKind.OVERLOADED, message)

    def _end(self, choices: list[Choice], kind: ErrorKind, message: str) -> list[Send]:
        sends = self.close(choices)
        for choice in choices:
            self._fail(choice, kind, message, "")
        return sends

    def deltas(self, message: TextDeltas, sender: Identity, now: float) -> list[Send]:
        """A batch of new text, in rows, that came at `now`."""
        finished = {end.row: end for end in message.finished}
        detailed = {*finished, *message.logprobs, *message.prompt_logprobs, *message.first}
        handles, starts, tokens = ints(message.handles), ints(message.starts), message.token_ids
        counts = ints(message.counts) if message.counts else [1] * len(handles)
        sends: list[Send] = []
        by_handle = self.by_handle
        engine: str | None = None
        counted = EngineCounts()  # of `engine`
        # Since the step's end. Only a process of the same host has the same clock.
        returned_s = max(0.0, now - message.timings_ns[DONE] / 1e9) if len(message.timings_ns) > DONE else 0.0
        end = 0  # of the row's tokens, in bytes
        for row, (handle, start, count, text) in enumerate(zip(handles, starts, counts, message.texts, strict=True)):
            begin, end = end, end + 4 * count
            choice = by_handle.get(handle)
            if choice is None:
                continue
            have = len(choice.token_ids)
            if start != have:
                if start > have:
                    sends.append(Send(sender, Attach(choice.handle, choice.submit.request_ids[0], have)))
                continue
            choice.token_ids.frombytes(tokens[begin:end])
            details = None
            if row in detailed:
                details = self._details(choice, message, row, finished.get(row), have)
            if choice.engine != engine:
                engine, counted = choice.engine, self.counts[choice.engine]
            if count:  # an end may come without tokens
                if have < choice.num_told:  # told once more
                    counted.num_tokens += max(0, have + count - choice.num_told)
                    choice.first_at = choice.first_at or now
                    choice.sink.has_begun = True
                else:
                    counted.num_tokens += count
                    if choice.last_at:
                        counted.intervals[now - choice.last_at] += 1
                    else:
                        choice.returned_s = returned_s
                        self._begin(choice, now)
                choice.last_at = now
            elif details is not None and choice.pooled:  # a vector is its request's first news, and its last
                choice.last_at = now
                self._begin(choice, now)
            choice.sink.row(choice, count, text, details)
        return sends + self.place() if finished and self.placement.patient else sends

    def _begin(self, choice: Choice, now: float) -> None:
        choice.first_at = now
        choice.sink.has_begun = True
        self.begun.append(choice)

    def _details(
        self, choice: Choice, message: TextDeltas, row: int, finished: Finished | None, begin: int
    ) -> RowDetails:
        """The details of this row beside tokens and text; the choice keeps those that outlast it. begin: its first output token."""
        logprobs, first = message.logprobs.get(row), message.first.get(row)
        details = RowDetails(finished, logprobs, message.prompt_logprobs.get(row), first)
        if details.first is not None:
            choice.engine = str(details.first.dp_rank)
            if (label := details.first.weights) and (not choice.weights or choice.weights[-1][1] != label):
                choice.weights.append((begin, label))
        if details.logprobs is not None and choice.submit.retry is not None:
            choice.logprobs += details.logprobs
        if finished is not None:
            self._forget(choice)
            choice.finished = finished
            choice.pooled = message.pooled.get(row, b"")
        return details

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for handle, choice in self.by_handle.items():
            assert choice.handle == handle
            assert choice.finished is None, "a finished choice is still open"
            assert choice.detokenizer in self.load, "an open choice whose detokenizer is gone"
        self.placement.check()
        assert self.unaccepted <= self.by_handle.keys(), "a prompt that nobody has is waited for"
        for identity, count in self.load.items():
            assert count == sum(1 for choice in self.by_handle.values() if choice.detokenizer == identity)


def _patience_s(choice: Choice) -> float:
    return BEGUN_S if choice.token_ids else NEW_S
