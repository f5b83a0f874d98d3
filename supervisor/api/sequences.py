"""One sequence that the Python API waits for, and how it is asked for again after its detokenizer's death; and the sequences that one
caller waits for. Owned by client.py."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from meshlm.protocol.edges.text import Submit
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, RequestId, Role
from meshlm.runtime.process.deaths import Death, one_more, poison, too_many
from meshlm.runtime.process.in_hand import short
from meshlm.supervisor.api.outputs import RequestOutput


class Run:
    """The sequences that one caller waits for. `news` gets those that have changed, after each message that changed some."""

    def __init__(self, bar: Any = None, news: "Callable[[list[Generated]], None] | None" = None) -> None:
        self.bar, self.news = bar, news
        self.num_open = 0
        self.errors: list[str] = []
        self.all_done = asyncio.Event()

    def ended(self) -> None:
        """One of them has."""
        self.num_open -= 1
        if self.bar is not None:
            self.bar.update(1)
        if not self.num_open:
            self.all_done.set()


class Generated:
    """Choice number `choice` of `submit`, whose tokens are in `output`."""

    __slots__ = (
        "begun", "choice", "deaths", "engine", "first_at", "had", "num_in_hand", "num_prompt", "opened_at", "output", "peer", "request",
        "run", "submit",
    )  # fmt: skip

    def __init__(self, request: RequestOutput, submit: Submit, choice: int, run: Run) -> None:
        self.request, self.output, self.run = request, request.outputs[choice], run
        self.submit, self.choice = submit, choice
        self.peer: Identity | None = None  # the detokenizer that has it
        self.begun = False  # its first token came
        self.opened_at = self.first_at = time.monotonic()
        self.engine = ""  # the rank that has begun it
        self.num_prompt = 0  # tokens of its prompt, once they are known
        self.had = 0  # tokens at this attempt's begin
        self.num_in_hand = 0  # deaths of detokenizers that had it in hand
        self.deaths: tuple[Death, ...] = ()  # that it met since the last token

    @property
    def name(self) -> RequestId:
        """The request's name in the mesh."""
        return self.submit.request_ids[self.choice]

    def again(self, handle: Handle, now: float, max_deaths: int, in_hand: tuple[str, ...] = ()) -> str:
        """Make its own Submit of what it was a part of, to go on after the tokens that are here; why not, when it is given up."""
        have = len(self.output.token_ids)
        before = () if have > self.had else self.deaths
        self.deaths = before if in_hand else one_more(before, Role.DETOKENIZER, now)
        self.num_in_hand += short(self.name) in in_hand
        self.had = have
        self.alone(handle)
        delivered = pack_i32(self.output.token_ids)
        suspect, attempt = self.num_in_hand > 0, self.submit.attempt + 1
        self.submit = msgspec.structs.replace(self.submit, attempt=attempt, delivered=delivered, suspect=suspect)
        return poison(Role.DETOKENIZER, self.num_in_hand) or too_many(self.deaths, max_deaths)

    def alone(self, handle: Handle) -> None:
        """Make its own Submit of what it was a part of."""
        sampling = self.submit.sampling
        self.submit = msgspec.structs.replace(
            self.submit,
            handles=(handle,),
            request_ids=(self.name,),
            sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + self.choice) & 0x7FFF_FFFF_FFFF_FFFF),
        )
        self.choice, self.peer = 0, None
