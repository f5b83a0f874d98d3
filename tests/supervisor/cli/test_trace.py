"""The file of `meshlm trace` is in Chrome's format: each event has what its kind needs, processes have names, arrows join."""

from collections import defaultdict
from typing import Any

from chrome_format import check

from meshlm.protocol.timeline import Span, TimelinePart
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.cli import trace

SCHEDULER, WORKER, DETOKENIZER = (Identity(role) for role in (Role.SCHEDULER, Role.WORKER, Role.DETOKENIZER))


def part(process: Identity, offset_ns: int, *spans: Span, host: str = "") -> TimelinePart:
    return TimelinePart(1, process, 100, offset_ns, spans, host=host)


PARTS = [
    part(WORKER, 0, Span("launch", "stepper", 5_000, 8_000, 77), Span("step", "device", 8_000, 9_500, 77), host="b"),
    part(SCHEDULER, 1_000, Span("plan", "loop", 1_000, 2_000, 77, {"step": 3}), Span("plan", "loop", 9_000, 9_100, 88)),
    part(DETOKENIZER, 0),
]


def test_every_process_that_has_a_timeline_has_its_place() -> None:
    assert set(trace.ORDER) == set(Role) - {Role.SUPERVISOR}


def test_the_format_is_right() -> None:
    check(trace.events(PARTS))
    check(trace.events([]))


def test_clocks_of_processes_become_one() -> None:
    found = {(one["name"], one["args"].get("step")): one for one in trace.events(PARTS) if one["ph"] == "X"}
    assert (found["plan", 3]["ts"], found["plan", 3]["dur"]) == (0.0, 1.0)
    assert found["launch", None]["ts"] == 3.0


def test_an_arrow_goes_through_all_places_of_a_step() -> None:
    events = trace.events(PARTS)
    arrows = [(one["id"], one["ph"], one["ts"]) for one in events if one["ph"] in "stf"]
    assert arrows == [("77", "s", 0.0), ("77", "t", 3.0), ("77", "f", 6.0)], "a step of one place has none"


def test_processes_and_tracks_have_names_and_an_order() -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for event in trace.events(PARTS):
        if event["ph"] == "M" and "name" in event["args"]:
            names[event["name"]].append(event["args"]["name"])
    assert names["process_name"] == ["detokenizer/0", "scheduler/0", "worker/0 on b"]
    assert names["thread_name"] == ["loop", "device", "stepper"]


def test_a_worse_file_is_found_out() -> None:
    """The check itself sees what Perfetto would stumble over."""
    good = trace.events(PARTS)
    spoilt: list[list[dict[str, Any]]] = [
        [one for one in good if one["name"] != "process_name"],
        [one for one in good if one["ph"] != "f"],
        [*good, {"ph": "X", "name": "a", "cat": "b", "pid": 1, "tid": 1, "ts": 1.0, "args": {}}],
        [*good, {"ph": "t", "name": "step", "cat": "b", "id": "5", "pid": 1, "tid": 1, "ts": 1.0}],
    ]
    for events in spoilt:
        try:
            check(events)
        except AssertionError:
            continue
        raise AssertionError("it was taken")
