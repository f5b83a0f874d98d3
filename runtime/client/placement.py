"""Which detokenizer has how many open choices, and which choices wait for one. Pure; owned by request_tracker.py.

A patient client (the Python API) has all that finds no room wait: after the first refusal for want of room as many choices leave as
end, and one now and then. An impatient one (HTTP) waits for a detokenizer alone; what finds no room is refused.
"""

from collections import deque

import msgspec

from meshlm.protocol.edges.text import PIECE_ENTRIES, Delivered, Submit, piece_len
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.client.choice import Choice
from meshlm.runtime.process.events import Send

PLACED_AT_ONCE = 1 << 6  # choices, in one turn of the loop; a piece of log-probabilities takes as long


class Placement:
    """The detokenizers of one client. `num_detokenizers` of the whole mesh: a request with an Idempotency-Key goes to one of them by
    its key, so that any frontend finds it, and waits while that one is away."""

    def __init__(self, *, patient: bool) -> None:
        self.patient = patient
        self.num_detokenizers = 1
        self.load: dict[Identity, int] = {}  # open choices by detokenizer
        self.orphans: dict[Choice, None] = {}  # without a detokenizer, in the order in which they came to be so
        self._queue: deque[Choice] = deque()  # orphans for which a detokenizer may be there
        self._told_to: Identity | None = None  # has the first of those logprobs of the next one's, before its Submit
        self._num_told = 0
        self._room: int | None = None  # choices that may leave now; None: any number

    def up(self, identity: Identity) -> None:
        self.load.setdefault(identity, 0)
        self.review()

    def down(self, identity: Identity) -> None:
        self.load.pop(identity, None)
        if self._told_to == identity:
            self._told_to, self._num_told = None, 0

    def review(self) -> None:
        """Puts all orphans into the queue once more, that one first whose logprobs are told."""
        told = [self._queue[0]] if self._told_to is not None else []
        self._queue = deque([*told, *self.orphans])

    @property
    def places_more(self) -> bool:
        """Whether `place` has more to send, in another turn of the loop."""
        return bool(self._queue) and self._room != 0

    def target(self, submit: Submit) -> Identity | None:
        """The detokenizer for it; None while it is not there."""
        if submit.retry is None:
            return self.least_loaded()
        home = Identity(Role.DETOKENIZER, int(submit.retry.key[:8], 16) % self.num_detokenizers)
        return home if home in self.load else None

    def target_of_new(self, submit: Submit) -> Identity | None:
        """The same for one that comes now: a patient client's waits behind those that wait already."""
        if self.patient and (self.orphans or self._room == 0):
            return None
        target = self.target(submit)
        if target is not None:
            self._leaves()
        return target

    def least_loaded(self) -> Identity | None:
        """The detokenizer with the fewest open choices; None while there is none."""
        return min(self.load, key=lambda identity: (self.load[identity], identity.index), default=None)

    def assign(self, choice: Choice, target: Identity) -> None:
        choice.detokenizer, choice.orphan_since = target, 0.0
        self.load[target] += 1

    def wait(self, choice: Choice, *, looks_now: bool = True) -> None:
        """It has no detokenizer. `looks_now`: `place` may find one at once, or once another has ended."""
        self.orphans[choice] = None
        if looks_now:
            self._queue.append(choice)

    @property
    def has_queue(self) -> bool:
        """Whether choices wait for the end of others."""
        return bool(self._queue) or self._room is not None

    def refused(self) -> None:
        """The mesh had no room for a choice of a patient client."""
        self._room = 0

    def ended(self, choice: Choice) -> None:
        """It is open no more, or its detokenizer has it no more: that leaves room."""
        if choice.detokenizer in self.load:
            self.load[choice.detokenizer] -= 1
        if self._room is not None:
            self._room += 1

    def retry_now(self) -> None:
        """Nothing may have ended for a while: one choice is tried all the same."""
        if self._room is not None:
            self._room = max(1, self._room)
        self.review()

    def _leaves(self) -> None:
        if self._room is not None:
            self._room -= 1

    def knows_of(self, choice: Choice) -> Identity | None:
        """The detokenizer that has logprobs of this orphan already, and will get its Submit."""
        told = self._told_to is not None and self._queue[0] is choice and choice in self.orphans
        return self._told_to if told else None

    def forget(self, choice: Choice) -> None:
        """It waits no more."""
        if self.knows_of(choice) is not None:
            self._queue.popleft()
            self._told_to, self._num_told = None, 0
        self.orphans.pop(choice, None)

    def place(self) -> tuple[list[Choice], list[Send]]:
        """Finds detokenizers for choices that have none, each alone, for as many as one turn of the loop may have: the choices, and
        what is to be sent."""
        placed, sends, num_entries = list[Choice](), list[Send](), 0
        while self.places_more and num_entries < PIECE_ENTRIES and len(sends) < PLACED_AT_ONCE:
            choice = self._queue[0]
            target = (self._told_to or self.target(choice.submit)) if choice in self.orphans else None
            if target is not None and self._num_told < len(choice.logprobs):
                begin, most = self._num_told, piece_len(choice.submit.sampling.logprobs)
                piece = tuple(choice.logprobs[begin : begin + most])
                sends.append(Send(target, Delivered(choice.submit.request_ids[0], piece)))
                self._told_to, self._num_told = target, begin + len(piece)
                num_entries += len(piece) * (1 + max(0, choice.submit.sampling.logprobs))
                continue
            if target is not None:
                del self.orphans[choice]
                choice.submit = msgspec.structs.replace(choice.submit, handles=(choice.handle,))
                self.assign(choice, target)
                self._leaves()
                placed.append(choice)
                sends.append(Send(target, choice.submit))
            self._queue.popleft()
            self._told_to, self._num_told = None, 0
        return placed, sends

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for choice in self.orphans:
            assert choice.finished is None, "a finished choice waits for a detokenizer"
            assert choice.detokenizer is None, "a choice that has a detokenizer waits for one"
