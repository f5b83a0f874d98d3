"""Which detokenizer has how many open choices, and which choices wait for one. Pure; owned by request_tracker.py.

A patient client (the Python API) has all that finds no room wait: after the first refusal for want of room as many choices leave as
end, and one now and then. An impatient one (HTTP) waits for a detokenizer alone; what finds no room is refused.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import Struct

from meshlm.protocol.edges import text as edge
from meshlm.protocol.edges.text import PIECE_ENTRIES
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Role
from meshlm.runtime.process.deaths import Death
from meshlm.runtime.process.events import Send

MAX_SEED = 0x7FFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence that is being generated, and what its caller has of it."""

    sink: "ResponseSink"
    index: int
    prompt_index: int
    submit: edge.Submit  # of this sequence alone, for the case that it must be continued alone
    handle: Handle
    detokenizer: Identity | None = None
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    # The log-probabilities of token_ids; kept only with a Retry, for its detokenizer's next incarnation.
    logprobs: list[edge.PositionLogprobs] = field(default_factory=list)
    affixes: tuple[bytes, bytes] | None = None  # its sink's: what stands around a text that alone makes a chunk
    finished: edge.Finished | None = None
    first: First | None = None  # what came with its first token
    weights: list[tuple[int, str]] = field(
        default_factory=list
    )  # from which output token on, which version of the weights
    engine: str = ""  # the rank that computes it, as clients know it; empty before its first token
    pooled: bytes = b""  # the vector of a pooling request, once it is finished: float32
    num_prompt_tokens: int = 0  # known once its prompt is encoded
    num_told: int = 0  # first tokens that connections before had, and their frontends counted
    begun_with: int = 0  # tokens at this attempt's begin
    num_in_hand: int = 0  # deaths of detokenizers that had it in hand
    deaths: tuple[Death, ...] = ()  # that it met since the last token
    retried: tuple[tuple[float, str], ...] = ()  # when its detokenizer was lost, and it went on at another
    orphan_since: float = 0.0  # since when it has no detokenizer; 0: it has one, or nobody has looked yet
    opened_at: float = 0.0  # when it was asked for, on this connection
    accepted_at: float = 0.0  # when its prompt was encoded; 0: it is not yet
    first_at: float = 0.0  # when its first token came; 0: none yet
    last_at: float = 0.0  # when its latest tokens came
    returned_s: float = 0.0  # from the end of its first token's step until that token came


class RowDetails(Struct, frozen=True):
    """The details that only few rows have beside tokens and text."""

    finished: edge.Finished | None = None
    logprobs: list[edge.PositionLogprobs] | None = None  # one for each token of the row
    prompt_logprobs: edge.PromptLogprobs | None = None
    first: First | None = None


NO_DETAILS = RowDetails()


class ResponseSink(Protocol):
    """The side of a request that hears of its choices' tokens, ends and failures."""

    choices: list[Choice]  # all of them
    has_begun: bool  # the first token of any of them came; set by request_tracker.py

    def accepted(self, choice: Choice, accepted: edge.Accepted) -> None: ...
    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        """`num_tokens` new tokens came, the last ones of `choice.token_ids`. Nearly all rows have no details."""
        ...

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None: ...


def choices_of(sink: ResponseSink, submit: edge.Submit, prompt_index: int = 0) -> list[Choice]:
    """A Choice for each sequence of a Submit, the next ones of its sink. Each draws from the Submit's seed and its own index."""
    found, sampling, retry = list[Choice](), submit.sampling, submit.retry
    for index, (handle, name) in enumerate(zip(submit.handles, submit.request_ids, strict=True)):
        own = msgspec.structs.replace(
            submit,
            handles=(handle,),
            request_ids=(name,),
            sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + index) & MAX_SEED),
            retry=None if retry is None else msgspec.structs.replace(retry, cuts=retry.cuts[index : index + 1]),
        )
        found.append(Choice(sink, len(sink.choices) + index, prompt_index, own, handle))
    sink.choices += found
    return found


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

    def target(self, submit: edge.Submit) -> Identity | None:
        """The detokenizer for it; None while it is not there."""
        if submit.retry is None:
            return self.least_loaded()
        home = Identity(Role.DETOKENIZER, int(submit.retry.key[:8], 16) % self.num_detokenizers)
        return home if home in self.load else None

    def target_of_new(self, submit: edge.Submit) -> Identity | None:
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
                begin, most = self._num_told, edge.piece_len(choice.submit.sampling.logprobs)
                piece = tuple(choice.logprobs[begin : begin + most])
                sends.append(Send(target, edge.Delivered(choice.submit.request_ids[0], piece)))
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
