"""Whose turn it is to be made: pure; owned by core.py.

So many items are made at once, in the order in which their bytes came. One that is made and finds no room keeps its place among them
until there is some, so what waits for room has few files, and the next ones are made when it has it.
"""

from collections import OrderedDict

from msgspec.structs import replace

from meshlm.mediaproc.events import Made
from meshlm.protocol.edges.media import LEASE_S

ROOM_WAIT_S = LEASE_S + 5.0  # what dead processes held is free by then


class Turns:
    """The jobs between their bytes and their items."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: OrderedDict[int, float] = OrderedDict()  # since when
        self._being_made: dict[int, float] = {}
        self._made: OrderedDict[int, tuple[Made, float]] = OrderedDict()  # they wait for room
        self._full_since: float | None = None  # there is no room for the first of those

    def wait(self, job: int, now: float) -> None:
        self._waiting[job] = now

    def next(self) -> int | None:
        """The job that is to be made now; None: none is."""
        if not self._waiting or self._made or len(self._being_made) >= self._at_once:
            return None
        job, since = self._waiting.popitem(last=False)
        self._being_made[job] = since
        return job

    def made(self, made: Made) -> None:
        """The item is there, and is to have room."""
        self._made[made.job] = made, self._being_made.pop(made.job)

    def waiting(self) -> list[int]:
        """The jobs that are not being made yet."""
        return list(self._waiting)

    def is_being_made(self, job: int) -> bool:
        return job in self._being_made

    def keep(self, job: int) -> None:
        """The unfinished file of this job has become a file of the cache."""
        made, since = self._made[job]
        self._made[job] = replace(made, part=""), since

    def first_made(self) -> Made | None:
        """The item that is to have room first."""
        return next((made for made, _ in self._made.values()), None)

    def note_full(self, now: float, *, full: bool) -> None:
        if not full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now

    def overdue(self, now: float) -> list[int]:
        """The jobs that have waited for room for too long."""
        if self._full_since is None or now < self._full_since + ROOM_WAIT_S:
            return []
        made = [job for job, (_, since) in self._made.items() if since + ROOM_WAIT_S <= now]
        return made + [job for job, since in self._waiting.items() if since + ROOM_WAIT_S <= now]

    def end(self, job: int) -> str:
        """The job is over; the unfinished file that it has."""
        self._waiting.pop(job, None)
        self._being_made.pop(job, None)
        made, _ = self._made.pop(job, (None, 0.0))
        return "" if made is None else made.part

    @property
    def num_waiting_for_room(self) -> int:
        return 0 if self._full_since is None else len(self._made) + len(self._waiting)

    def check(self, jobs: set[int]) -> None:
        """AssertionError when the state contradicts itself. jobs: those whose bytes are there."""
        each = [*self._waiting, *self._being_made, *self._made]
        assert len(each) == len(set(each)) == len(jobs), "a job in two places, or in none"
        assert set(each) == jobs
        assert len(self._being_made) + len(self._made) <= self._at_once
