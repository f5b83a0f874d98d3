"""Whether a mesh whose supervisor died is this command's to take over, and what is said of it. serve.py calls it."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.digest import schema_digest
from meshlm.supervisor.errors import StillRuns
from meshlm.supervisor.group.succession import MeshState
from meshlm.supervisor.processes import state_file
from meshlm.supervisor.settings import flags


def checked(left: MeshState | None, config: MeshConfig, run_dir: Path, *, renders_only: bool = False) -> MeshState:
    """What was left there, where this configuration of the flags is the mesh's. StillRuns says what is another."""
    outline = state_file.outline(run_dir)
    why = ""
    if left is None or left.digest != schema_digest():
        version = outline.version if outline is not None else "another version"
        why = f"they speak the protocol of {version}, which is not this one's"
    elif other := sorted(_other(left, config, renders_only)):
        why = f"they were started with other flags: {', '.join(other)}"
    if why or left is None:
        pids = " ".join(map(str, outline.alive if outline is not None else ()))
        what = f"start it as it was, wait until its --orphan-grace is over, or end it: kill {pids}"
        raise StillRuns(f"--run-dir {run_dir}: processes of a mesh whose supervisor died run there, and {why}; {what}")
    return left


def _other(left: MeshState, config: MeshConfig, renders_only: bool) -> Iterator[str]:
    """The flags that are not as they were."""
    asked = state_file.without_keys(config)
    asked = replace(
        asked, run=replace(asked.run, run_dir=left.asked.run.run_dir)
    )  # one directory, however it was named
    for one in flags.settings():
        was = getattr(getattr(left.asked, one.section), one.name)
        if getattr(getattr(asked, one.section), one.name) != was:
            yield f"{one.flag} was {was!r}"
    if not state_file.has_keys(left, config):
        yield "the API's keys"
    resolved = left.config.resolved
    if renders_only != (resolved is not None and resolved.renders_only):
        yield "`meshlm serve` and `meshlm launch render`"


def drain_s(left: MeshState, now_s: float) -> float | None:
    """The seconds that requests have yet, where the mesh was being ended; None where it was not."""
    return None if left.stops_at is None else max(0.0, left.stops_at - now_s)


def said(left: MeshState) -> str:
    """The line for the user."""
    num = sum(bool(place.pid) for place in left.places)
    return f"the supervisor has died: this process follows it, and takes over {num} processes"
