"""What the dashboard shows of requests: where the time of each went, here and at the other frontends. Pure; used by feed.py."""

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from meshlm.frontend.openai.responses import Response, visible_reason
from meshlm.protocol.dashboard import RequestView
from meshlm.protocol.edges.control import FrontendRequests
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.edges.token import First
from meshlm.runtime.client.placement import Choice, ResponseSink

MAX_ENDED = 1000
SILENT_S = 2.0  # another frontend that says nothing for so long has no running requests to show
MAX_ERROR = 200  # characters of a message
MAX_RUNNING, MAX_LOOKED_AT = 50, 400  # requests that are shown while they run, and choices that are looked at for them

# In the order of Noted.
_OF_CHOICE = attrgetter(
    *("opened_at", "accepted_at", "first_at", "last_at", "returned_s", "first", "finished", "engine"),
    *("num_prompt_tokens", "submit.attempt"),
)


class Noted(NamedTuple):
    """A request as it was at a moment. A server notes each one at its end; views are made of those that somebody looks at."""

    name: str
    path: str
    status: int
    error: str
    num_choices: int
    num_output_tokens: int
    now: float  # monotonic, as all that follow
    wall_s: float
    opened_at: float
    accepted_at: float
    first_at: float
    last_at: float
    returned_s: float
    first: First | None
    finished: Finished | None
    rank: str
    num_prompt_tokens: int
    attempt: int


class EndedLog:
    """The last MAX_ENDED requests."""

    def __init__(self) -> None:
        self.num_ended = 0
        self._noted: deque[Noted] = deque(maxlen=MAX_ENDED)
        self._num_taken = 0

    def add(self, noted: Noted) -> None:
        self.num_ended += 1
        self._noted.append(noted)

    def take_fresh(self) -> tuple[RequestView, ...]:
        """Those since it was last called."""
        count = min(self.num_ended - self._num_taken, len(self._noted))
        self._num_taken = self.num_ended
        return tuple(map(view, islice(self._noted, len(self._noted) - count, None)))

    def later_than(self, wall_s: float) -> tuple[float, tuple[RequestView, ...]]:
        """When the newest one ended (or wall_s), and those that ended after wall_s."""
        found: deque[Noted] = deque()
        for noted in reversed(self._noted):
            if noted.wall_s <= wall_s:
                break
            found.appendleft(noted)
        return (found[-1].wall_s if found else wall_s), tuple(map(view, found))

    def all(self) -> tuple[RequestView, ...]:
        """The newest last."""
        return tuple(map(view, self._noted))


def ended(answer: Response, path: str, status: int, now: float) -> Noted | None:
    """The request that has its answer now; None where nothing was asked of the mesh."""
    choices = answer.choices
    if not choices or not choices[0].opened_at:
        return None
    error = answer.error.message[:MAX_ERROR] if answer.error is not None else ""
    return _note(answer.request_id, choices, len(choices), now, path, status, error)


def running(choices: Iterable[Choice], now: float) -> tuple[RequestView, ...]:
    """The oldest requests of those that run; `choices` come in the order of their age."""
    by_sink: dict[ResponseSink, list[Choice]] = {}
    for choice in islice(choices, MAX_LOOKED_AT):
        if choice.opened_at and (choice.sink in by_sink or len(by_sink) < MAX_RUNNING):
            by_sink.setdefault(choice.sink, []).append(choice)
    named = ((str(some[0].submit.request_ids[0]), some, len(sink.choices)) for sink, some in by_sink.items())
    return tuple(view(_note(*request, now)) for request in named)


def _note(
    name: str, choices: list[Choice], num_choices: int, now: float, path: str = "", status: int = 0, error: str = ""
) -> Noted:
    if len(choices) == 1:
        (slowest,) = choices
        num_output = len(slowest.token_ids)
    else:
        slowest = max(choices, key=lambda choice: choice.last_at or (choice.opened_at and now))
        num_output = sum(len(choice.token_ids) for choice in choices)
    return Noted(name, path, status, error, num_choices, num_output, now, time.time(), *_OF_CHOICE(slowest))


def view(noted: Noted) -> RequestView:
    seconds = noted.now - noted.opened_at
    return RequestView(
        id=noted.name,
        path=noted.path,
        at_s=round(noted.wall_s - seconds, 3),
        seconds=round(seconds, 6),
        hops={name: round(value, 6) for name, value in _hops(noted).items()},
        status=noted.status,
        rank=noted.rank,
        num_choices=noted.num_choices,
        num_prompt_tokens=noted.num_prompt_tokens,
        num_cached_tokens=noted.first.num_cached_tokens if noted.first is not None else 0,
        num_output_tokens=noted.num_output_tokens,
        num_attempts=1 + noted.attempt,
        finish_reason=visible_reason(noted.finished) if noted.finished is not None else "",
        error=noted.error,
    )


def _hops(noted: Noted) -> dict[str, float]:
    """Seconds by hop. With its first token come those that processes counted; the rest is the way between them."""
    now = noted.now
    if not noted.accepted_at:
        return {"encode": now - noted.opened_at}
    hops = {"encode": noted.accepted_at - noted.opened_at}
    if not noted.first_at:
        return {**hops, "first token": now - noted.accepted_at}
    if (first := noted.first) is not None:
        hops = {
            "encode": first.encode_us / 1e6,
            "route": first.route_us / 1e6,
            "queue": first.queued_us / 1e6,
            "prefill": first.prefill_us / 1e6,
        }
    way = max(0.0, noted.first_at - noted.opened_at - sum(hops.values()))
    back = min(way, noted.returned_s)
    hops |= {"links": way - back, "return": back}
    end = noted.last_at if noted.finished is not None else now
    hops["decode"] = end - noted.first_at
    if noted.finished is not None:
        hops["write"] = max(0.0, now - noted.last_at)
    return hops


class OtherFrontends:
    """What other frontends have told of their requests: the newest of each, and the last MAX_ENDED of all. `now` is of the
    loop's clock."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, FrontendRequests]] = {}
        self._ended: deque[RequestView] = deque(maxlen=MAX_ENDED)
        self._fresh: list[RequestView] = []

    def take(self, told: FrontendRequests, now: float) -> None:
        """An answer. One that was asked for before the last one came says the same again."""
        known = self._told.get(told.frontend)
        if known is not None and told.since_s < known[1].until_s:
            return
        self._told[told.frontend] = (now, told)
        ended = [replace(view, frontend=told.frontend) for view in told.ended]
        self._ended.extend(ended)
        self._fresh = (self._fresh + ended)[-MAX_ENDED:]

    def since_s(self) -> dict[str, float]:
        """When the newest request that each has told of ended: what it is asked for comes after that."""
        return {name: told.until_s for name, (_, told) in self._told.items()}

    def have_told(self, frontends: Iterable[str], since: float) -> bool:
        """Whether all of these have answered since then."""
        return all(name in self._told and self._told[name][0] >= since for name in frontends)

    @property
    def num_ended(self) -> int:
        return sum(told.num_ended for _, told in self._told.values())

    def take_fresh(self) -> tuple[RequestView, ...]:
        """The ended ones since it was last called."""
        fresh, self._fresh = self._fresh, []
        return tuple(fresh)

    def with_ended(self, own: Iterable[RequestView]) -> tuple[RequestView, ...]:
        """The last MAX_ENDED of one's own and of these, the newest last."""
        return tuple(sorted((*own, *self._ended), key=lambda view: view.at_s + view.seconds))[-MAX_ENDED:]

    @property
    def any(self) -> bool:
        """Whether there are others, as far as is known."""
        return bool(self._told)

    def heard(self, now: float) -> list[FrontendRequests]:
        """What each said last, of those that are not silent."""
        return [told for at, told in self._told.values() if now - at < SILENT_S]

    def with_running(self, own: Iterable[RequestView], now: float) -> tuple[RequestView, ...]:
        """The MAX_RUNNING oldest of one's own and of these."""
        theirs = [replace(view, frontend=told.frontend) for told in self.heard(now) for view in told.running]
        return tuple(sorted((*own, *theirs), key=lambda view: view.at_s)[:MAX_RUNNING]) if theirs else tuple(own)
