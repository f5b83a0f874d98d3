"""What the dashboard shows of requests: where the time of each went. Pure; used by feed.py."""

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from meshlm.frontend.choice import Choice, ResponseSink
from meshlm.frontend.responses import Response, visible_reason
from meshlm.protocol.dashboard import RequestView

MAX_ENDED = 1000
MAX_ERROR = 200  # characters of a message
MAX_RUNNING, MAX_LOOKED_AT = 50, 400  # requests that are shown while they run, and choices that are looked at for them


class EndedLog:
    """The last MAX_ENDED requests. `fresh`: those since it was last taken."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.all: deque[RequestView] = deque(maxlen=MAX_ENDED)
        self._num_taken = 0

    def add(self, request: RequestView) -> None:
        self.num_ended += 1
        self.all.append(request)

    def take_fresh(self) -> tuple[RequestView, ...]:
        count = min(self.num_ended - self._num_taken, len(self.all))
        self._num_taken = self.num_ended
        return tuple(islice(self.all, len(self.all) - count, None))


def ended(answer: Response, path: str, status: int, now: float) -> RequestView | None:
    """The request that has its answer now; None where nothing was asked of the mesh."""
    choices = [choice for choice in answer.choices if choice.opened_at]
    if not choices:
        return None
    error = answer.error.message[:MAX_ERROR] if answer.error is not None else ""
    return _view(answer.request_id, choices, len(choices), now, path, status, error)


def running(choices: Iterable[Choice], now: float) -> tuple[RequestView, ...]:
    """The oldest requests of those that run; `choices` come in the order of their age."""
    by_sink: dict[ResponseSink, list[Choice]] = {}
    for choice in islice(choices, MAX_LOOKED_AT):
        if choice.opened_at and (choice.sink in by_sink or len(by_sink) < MAX_RUNNING):
            by_sink.setdefault(choice.sink, []).append(choice)
    return tuple(
        _view(str(some[0].submit.request_ids[0]), some, len(sink.choices), now) for sink, some in by_sink.items()
    )


def _view(
    name: str, choices: list[Choice], num_choices: int, now: float, path: str = "", status: int = 0, error: str = ""
) -> RequestView:
    slowest = max(choices, key=lambda choice: choice.last_at or now)
    seconds = now - slowest.opened_at
    finished = slowest.finished
    return RequestView(
        id=name,
        path=path,
        at_s=round(time.time() - seconds, 3),
        seconds=round(seconds, 6),
        hops={name: round(value, 6) for name, value in _hops(slowest, now).items()},
        status=status,
        rank=slowest.engine,
        num_choices=num_choices,
        num_prompt_tokens=slowest.num_prompt_tokens,
        num_cached_tokens=slowest.first.num_cached_tokens if slowest.first is not None else 0,
        num_output_tokens=sum(len(choice.token_ids) for choice in choices),
        num_attempts=1 + slowest.submit.attempt,
        finish_reason=visible_reason(finished) if finished is not None else "",
        error=error,
    )


def _hops(choice: Choice, now: float) -> dict[str, float]:
    """Seconds by hop. With its first token come the seconds that processes counted until then; the rest of them is the way between
    these processes."""
    if not choice.accepted_at:
        return {"encode": now - choice.opened_at}
    hops = {"encode": choice.accepted_at - choice.opened_at}
    if not choice.first_at:
        return {**hops, "first token": now - choice.accepted_at}
    if (first := choice.first) is not None:
        hops = {
            "encode": first.encode_us / 1e6,
            "route": first.route_us / 1e6,
            "queue": first.queued_us / 1e6,
            "prefill": first.prefill_us / 1e6,
        }
    way = max(0.0, choice.first_at - choice.opened_at - sum(hops.values()))
    back = min(way, choice.returned_s)
    hops |= {"links": way - back, "return": back}
    end = choice.last_at if choice.finished is not None else now
    hops["decode"] = end - choice.first_at
    if choice.finished is not None:
        hops["write"] = max(0.0, now - choice.last_at)
    return hops
