"""Timelines of several processes as one file in Chrome's trace format, which Perfetto reads. Pure.

A process is a process there, its threads and devices are tracks, and arrows connect what belongs to one step: its plan, the worker's
launch, the device, the result, its text, the socket.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from meshlm.protocol.timeline import Span, TimelinePart
from meshlm.protocol.wire.ids import Role

ORDER = (Role.FRONTEND, Role.DETOKENIZER, Role.COORDINATOR, Role.SCHEDULER, Role.WORKER)
CATEGORY = "meshlm"


def events(timelines: Sequence[TimelinePart]) -> list[dict[str, Any]]:
    """All events. Times are microseconds since the first of them."""
    ordered = sorted(timelines, key=lambda record: (ORDER.index(record.process.role), record.process.index))
    begun_ns = min((span.begin_ns + record.offset_ns for record in timelines for span in record.spans), default=0)
    found: list[dict[str, Any]] = []
    flows: dict[int, list[tuple[float, int, int]]] = {}  # by step: when, where
    for number, record in enumerate(ordered, 1):
        name = f"{record.process}" + (f" on {record.host}" if record.host else "")
        found += _named("process_name", number, 0, name)
        found.append(_sorted(number, number))
        tracks = {track: at for at, track in enumerate(sorted({span.track for span in record.spans}), 1)}
        for track, thread in tracks.items():
            found += _named("thread_name", number, thread, track)
        for span in record.spans:
            at = (span.begin_ns + record.offset_ns - begun_ns) / 1e3
            thread = tracks[span.track]
            found.append(_complete(span, number, thread, at))
            if span.flow:
                flows.setdefault(span.flow, []).append((at, number, thread))
    for flow, points in flows.items():
        found += _arrows(flow, sorted(points))
    return found


def _named(what: str, process: int, thread: int, name: str) -> list[dict[str, Any]]:
    return [{"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}]


def _sorted(process: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": index}}


def _complete(span: Span, process: int, thread: int, at: float) -> dict[str, Any]:
    duration = max(0, span.end_ns - span.begin_ns) / 1e3
    where = {"pid": process, "tid": thread, "ts": at, "dur": duration}
    return {"ph": "X", "cat": CATEGORY, "name": span.name, **where, "args": dict(span.facts)}


def _arrows(flow: int, points: Sequence[tuple[float, int, int]]) -> Iterable[dict[str, Any]]:
    """One arrow through all places of a step; a step of which one place is known has none."""
    if len(points) < 2:
        return
    last = len(points) - 1
    for number, (at, process, thread) in enumerate(points):
        phase = "s" if number == 0 else "f" if number == last else "t"
        end = {"bp": "e"} if phase == "f" else {}
        where = {"pid": process, "tid": thread, "ts": at}
        yield {"ph": phase, "cat": CATEGORY, "name": "step", "id": str(flow), **where, **end}
