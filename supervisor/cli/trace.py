"""`meshlm trace`: what all processes of a live mesh do for a few seconds, in one file of Chrome's trace format that Perfetto shows.

A process is a process there, its threads and devices are tracks, and arrows connect what belongs to one step: its plan, the worker's
launch, the device, the result, its text, the socket.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshlm.protocol.timeline import MAX_SECONDS, Span, TimelinePart
from meshlm.protocol.wire.ids import Role
from meshlm.supervisor import control
from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import StartError, UsageError, raised_as

POLL_S = 0.1
ANSWER_S = 30.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "trace",
        help="record what all processes do, as a file for Perfetto",
        description="Records plans, sends, steps of devices, decoding and writing of all processes of a mesh that runs, and writes one "
        "file in Chrome's trace format. Open it at https://ui.perfetto.dev, which reads it in the browser.",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help=f"how long, at most {MAX_SECONDS:g} (default: 5)")
    output, gpu = "file to write (default: trace.json)", "with the kernels of the workers' devices; the server needs "
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help=output)
    parser.add_argument("--gpu", action="store_true", help=f"{gpu}--profiler-dir")
    status.add_mesh_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.seconds <= MAX_SECONDS:
        raise UsageError(f"--seconds: more than 0 and at most {MAX_SECONDS:g}")
    if not arguments.output.absolute().parent.is_dir():
        raise UsageError(f"-o {arguments.output}: there is no such folder")
    run_dir = status.find(arguments.port, arguments.run_dir)
    if arguments.gpu:
        _profile(run_dir, start=True)
    begun = _ask(run_dir, {"command": "trace", "seconds": arguments.seconds})
    print(f"recording {begun['processes']} processes for {arguments.seconds:g} s", flush=True)
    try:
        time.sleep(arguments.seconds)
        told = _wait(run_dir, {"command": "trace-state", "number": begun["number"]})
    finally:
        kernels = _profile(run_dir, start=False) if arguments.gpu else []
    timelines = _read(Path(str(told["path"])))
    found = events(timelines)
    for path in kernels:
        found += _of_profiler(Path(str(path)), timelines)
    with raised_as(StartError, OSError, of=f"-o {arguments.output}"):
        arguments.output.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}), "utf-8")
    lost = sum(record.num_lost for record in timelines)
    print(f"{arguments.output}: {len(timelines)} processes, {sum(len(one.spans) for one in timelines)} spans")
    if lost:
        print(f"{lost} older spans are left out: there was no room for them; record fewer seconds")
    for name in told["missing"]:
        print(f"{name} did not tell what it did")
    return 0


def _ask(run_dir: Path, request: dict[str, object]) -> dict[str, Any]:
    return control.request(run_dir, request, timeout_s=ANSWER_S)


def _profile(run_dir: Path, *, start: bool) -> list[str]:
    """Begin or end torch's profiler in all workers; the files that they wrote."""
    _ask(run_dir, {"command": "profile", "start": start})
    return [str(path) for path in _wait(run_dir, {"command": "profile-state"})["paths"]]


def _wait(run_dir: Path, request: dict[str, object]) -> dict[str, Any]:
    while not (told := _ask(run_dir, request))["done"]:
        time.sleep(POLL_S)
    return told


def _read(path: Path) -> list[TimelinePart]:
    try:
        timelines = msgspec.msgpack.decode(path.read_bytes(), type=list[TimelinePart])
        path.unlink()
    except OSError:
        raise StartError("no process told what it did") from None
    return timelines


def _of_profiler(path: Path, timelines: list[TimelinePart]) -> list[dict[str, Any]]:
    """Events of torch's profiler, on the same clock. A file of another node is named, and left where it is."""
    if not path.exists():
        print(f"{path} is on its node")
        return []
    try:
        told = json.loads(path.read_bytes())
    except ValueError:
        raise StartError(f"{path}: it is no JSON") from None
    begun_ns = min((span.begin_ns + record.offset_ns for record in timelines for span in record.spans), default=0)
    shift = (int(told.get("baseTimeNanoseconds", 0)) - begun_ns) / 1e3
    name = path.name.split(".")[0]
    found = []
    for event in told.get("traceEvents", ()):
        if "pid" in event:
            moved = {"ts": event["ts"] + shift} if "ts" in event and event.get("ph") != "M" else {}
            found.append(event | moved | {"pid": f"{name} {event['pid']}"})
    return found


ORDER = (*(Role.FRONTEND, Role.MEDIA, Role.DETOKENIZER, Role.COORDINATOR, Role.SCHEDULER, Role.WORKER, Role.STORE),)
CATEGORY = "meshlm"


def events(timelines: Sequence[TimelinePart]) -> list[dict[str, Any]]:
    """All events. Times are microseconds since the first of them."""
    ordered = sorted(timelines, key=lambda record: (ORDER.index(record.process.role), record.process.index))
    begun_ns = min((span.begin_ns + record.offset_ns for record in timelines for span in record.spans), default=0)
    found: list[dict[str, Any]] = []
    flows: dict[int, list[tuple[float, int, int]]] = {}  # by step: when, where
    for number, record in enumerate(ordered, 1):
        name = f"{record.process}" + (f" on {record.host}" if record.host else "")
        found.append(_metadata("process_name", number, 0, {"name": name}))
        found.append(_metadata("process_sort_index", number, 0, {"sort_index": number}))
        tracks = {track: at for at, track in enumerate(sorted({span.track for span in record.spans}), 1)}
        for track, thread in tracks.items():
            found.append(_metadata("thread_name", number, thread, {"name": track}))
        for span in record.spans:
            at = (span.begin_ns + record.offset_ns - begun_ns) / 1e3
            thread = tracks[span.track]
            found.append(_complete(span, number, thread, at))
            if span.flow:
                flows.setdefault(span.flow, []).append((at, number, thread))
    for flow, points in flows.items():
        found += _arrows(flow, sorted(points))
    return found


def _metadata(what: str, process: int, thread: int, args: dict[str, object]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


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
