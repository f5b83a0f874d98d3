"""What processes did and when, for `meshlm trace`: asked for by the supervisor, recorded by each process, told at the end."""

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity

MAX_SECONDS = 60.0


class RecordTimeline(Struct, frozen=True, tag="record_timeline"):
    """To each process, and to other nodes' supervisors: note what you do for so long, then tell it. A newer one ends an older one."""

    number: int
    seconds: float


class Span(Struct, frozen=True, array_like=True):
    """Something that took time, on the monotonic clock. `flow` connects what belongs to one step: when that was planned."""

    name: str
    track: str  # a thread, or a device
    begin_ns: int
    end_ns: int
    flow: int = 0
    facts: dict[str, str | int] = {}


class TimelinePart(Struct, frozen=True, tag="timeline_part"):
    """One process's spans. `offset_ns` makes the wall clock's time of its monotonic clock's."""

    number: int
    process: Identity
    pid: int
    offset_ns: int
    spans: tuple[Span, ...]
    num_lost: int = 0  # older ones, for which there was no room
    host: str = ""
