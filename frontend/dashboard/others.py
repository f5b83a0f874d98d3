"""What other frontends have told of their requests, for a dashboard that shows those of all. Pure; used by feed.py."""

from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from meshlm.frontend.dashboard.requests import MAX_ENDED, MAX_RUNNING
from meshlm.protocol.dashboard import RequestView
from meshlm.protocol.edges.control import FrontendRequests

SILENT_S = 2.0  # a frontend that says nothing for so long has no running requests to show


class OtherFrontends:
    """The newest of each, and the last MAX_ENDED requests of all. `now` is of the loop's clock."""

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
