"""Checks a list of trace events as strictly as Perfetto's importer of Chrome's JSON does; and arrows must join slices."""

import json
from collections import defaultdict
from typing import Any

METADATA = {"process_name", "thread_name", "process_sort_index"}


def check(events: list[dict[str, Any]]) -> None:
    """AssertionError for the first event that is not right."""
    json.dumps(events, allow_nan=False)
    processes, threads = set(), set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys(), event
        assert isinstance(event["pid"], int), event
        match event["ph"]:
            case "M":
                assert event["name"] in METADATA, event
                if event["name"] == "process_name":
                    assert event["pid"] not in processes, "a process has two names"
                    processes.add(event["pid"])
                elif event["name"] == "thread_name":
                    threads.add((event["pid"], event["tid"]))
            case "X":
                assert {"ts", "dur", "args"} <= event.keys(), event
                assert event["ts"] >= 0, event
                assert event["dur"] >= 0, event
                assert isinstance(event["args"], dict), event
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "t" | "f":
                assert isinstance(event["id"], str), event
                assert (event["ph"] == "f") == (event.get("bp") == "e"), event
                flows[event["id"]].append((event["ts"], event["ph"]))
            case phase:
                raise AssertionError(f"phase {phase}")
    for place in slices:
        assert place[0] in processes, f"process {place[0]} has no name"
        assert place in threads, f"track {place} has no name"
    for name, places in flows.items():
        assert places == sorted(places, key=lambda place: place[0]), f"flow {name} goes back in time"
        assert [phase for _, phase in places] == ["s", *"t" * (len(places) - 2), "f"], f"flow {name}: {places}"
    for event in events:
        if event["ph"] in "stf":
            at = event["ts"]
            inside = [begin <= at <= end for begin, end in slices[event["pid"], event["tid"]]]
            assert any(inside), f"an arrow ends in nothing: {event}"
