"""One suspect at a time (suspects.py): which of those that may have killed a worker is computed now. Pure; owned by batching.py."""

from meshlm.scheduler_proc.request import Request, RequestState


class Trial:
    """It lasts until the suspect gets its next token, or leaves its place."""

    def __init__(self, max_crashes: int) -> None:
        self._max_crashes = max_crashes
        self._of: Request | None = None

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a suspect is being computed, and the request is another one, or new. If not, it is the suspect's turn."""
        most, now = self._max_crashes, self._of
        busy = now is not None and now.state is RequestState.RUNNING and now.is_suspect(most)
        if not busy:
            self._of = request if request.is_suspect(most) else None
        return busy and (request.is_suspect(most) or not request.has_begun)
