"""Perfetto reads the file of `meshlm trace`: spans, processes, threads and arrows, without a complaint."""

import json
from pathlib import Path

from perfetto import perfetto

from meshlm.protocol.timeline import Span, TimelinePart
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.cli import trace

SCHEDULER, WORKER = Identity(Role.SCHEDULER), Identity(Role.WORKER)
PARTS = [
    TimelinePart(
        1, WORKER, 100, 0, (Span("launch", "stepper", 5_000, 8_000, 77), Span("step", "device", 8_000, 9_500, 77))
    ),
    TimelinePart(1, SCHEDULER, 100, 1_000, (Span("plan", "loop", 1_000, 2_000, 77, {"step": 3}),)),
]


def test_it_has_all_that_was_written(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace.events(PARTS)}))
    with perfetto(file) as found:
        assert not found.complaints()
        rows = found.query(
            "select slice.name as slice, slice.dur as ns, thread.name as thread, process.name as process from slice"
            " join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
            " order by slice.ts"
        )
        assert rows == [
            ["plan", 1000, "loop", "scheduler/0"],
            ["launch", 3000, "stepper", "worker/0"],
            ["step", 1500, "device", "worker/0"],
        ]
        arrows = (
            "select a.name as a, b.name as b from flow join slice a on slice_out = a.id join slice b on slice_in = b.id"
        )
        assert found.query(arrows + " order by a.ts") == [["plan", "launch"], ["launch", "step"]]
        assert found.query("select int_value as step from args where key = 'args.step'") == [[3]]


def test_it_says_what_it_cannot_read(tmp_path: Path) -> None:
    """So that no complaint means something."""
    events = [one for one in trace.events(PARTS) if one["ph"] not in "stf"]
    for one in events:
        one.pop("ts", None)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    with perfetto(file) as found:
        assert found.complaints()
