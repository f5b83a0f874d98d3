"""One suspect at a time (suspects.py), alone in its steps, until it gets on: if a worker dies then, it has done it. Pure; owned by
batching.py."""

from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import RequestState

WAITS = (RequestState.WAITING, RequestState.PREEMPTED)


class Trial:
    """The suspects of this rank that wait, and the one that is computed."""

    def __init__(self, max_crashes: int) -> None:
        self._max_crashes = max_crashes
        self._of: Request | None = None
        self._waiting: list[Request] = []

    def enqueued(self, request: Request) -> None:
        """It waits for its turn; a suspect among the suspects."""
        if request.is_suspect(self._max_crashes):
            self._waiting.append(request)

    @property
    def now(self) -> Request | None:
        """The suspect that is computed now; nobody else is meanwhile."""
        request = self._of
        if request is not None and not (
            request.state is RequestState.RUNNING and request.is_suspect(self._max_crashes)
        ):
            request = self._of = None
        return request

    def begin(self, request: Request) -> None:
        self._of = request

    def next(self) -> Request | None:
        if not self._waiting:
            return None
        self._waiting = [one for one in self._waiting if one.state in WAITS and one.is_suspect(self._max_crashes)]
        ready = (one for one in self._waiting if one.waits is None)
        return next(ready, None)
