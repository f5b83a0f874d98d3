"""The state of a mesh as `meshlm status` prints it: this host's processes, and what other nodes reported. io.py calls it.

It looks at the processes and changes nothing.
"""

import os
import time
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

import psutil

from meshlm import __version__
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import Heartbeat, MeshProcesses, News
from meshlm.protocol.wire.ids import Identity
from meshlm.supervisor.control import MeshStatus, ProcessStatus, StandbyStatus
from meshlm.supervisor.group.core import Process
from meshlm.supervisor.group.scaling import Scaling
from meshlm.supervisor.nodes.network import Guest, Head
from meshlm.supervisor.processes.children import Child
from meshlm.supervisor.processes.incarnations import Incarnations
from meshlm.supervisor.processes.spare import Spare

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STANDBYS_S = 5.0  # the memory of standbys is read anew so often


def mesh_status(
    config: MeshConfig,
    processes: Iterable[Process],
    incarnations: Incarnations,
    network: Head | Guest | None,
    scaling: Scaling,
    beats: Mapping[Identity, Heartbeat],
    sent: dict[str, int],
    *,
    was_ready: bool,
    now: float,
    spares: Iterable[Spare] = (),
) -> MeshStatus:
    """The supervisor first, then this host's, then other nodes'. `now` is of the group's clock; `beats` came last from each of this
    host's processes, and `sent` is the supervisor's own."""
    host = config.node.host if config.node else ""
    pids = incarnations.pids()  # of those that are alive
    rows = [_own(config, host, sent)]
    ends = incarnations.ends
    rows += [
        _child(one, pids.get(one.identity, 0), host, now, beats.get(one.identity), ends.get(one.identity, ""))
        for one in processes
    ]
    rows += network.rows() if network is not None else []
    loaded: list[Child | Spare] = [*incarnations.standbys(), *spares]
    standbys = [_standby(child, host) for child in loaded]
    standbys += network.standbys() if network is not None else []
    missing = network.missing() if network is not None else ""
    resolved = config.resolved
    return MeshStatus(
        processes=rows,
        standbys=standbys,
        model=resolved.served_names[0] if resolved else "",
        port=0 if config.network.headless else config.server.port,
        run_dir=config.run.run_dir,
        version=__version__,
        ready=was_ready and not missing and all(row.state == "ready" for row in rows),
        data_parallel_size=config.parallel.data_parallel_size,
        scaling=scaling.doing,
        scaling_failed=scaling.failed,
        record_requests=str(Path(config.server.record_requests).absolute()) if config.server.record_requests else "",
        missing=missing,
        dp_roles=config.kv_transfer.dp_roles,
    )


def for_frontend(status: MeshStatus, news: Iterable[News]) -> MeshProcesses:
    now = time.time()
    processes = tuple(row.report(now) for row in status.processes)
    return MeshProcesses(processes, tuple(one.report(now) for one in status.standbys), tuple(news), status.missing)


def _own(config: MeshConfig, host: str, sent: dict[str, int]) -> ProcessStatus:
    me = _process(os.getpid())
    started = me.create_time()
    return ProcessStatus(
        role="supervisor",
        index=config.node.index if config.node else 0,
        pid=os.getpid(),
        incarnation=int(started * 1e9),
        state="ready",
        uptime_s=time.time() - started,
        restarts=0,
        rss_bytes=_rss(me.pid),
        host=host,
        sent=sent,
    )


def _child(process: Process, pid: int, host: str, now: float, beat: Heartbeat | None, end: str) -> ProcessStatus:
    beat = beat if pid else None  # it is gone
    return ProcessStatus(
        role=process.identity.role.value,
        index=process.identity.index,
        pid=pid,
        incarnation=process.incarnation,
        state=process.state.value,
        uptime_s=round(now - process.started_at, 3) if pid else 0.0,
        restarts=process.restarts,
        phase=process.phase,
        rss_bytes=beat.rss_bytes if beat is not None else _rss(pid) if pid else 0,
        host=host,
        sent=beat.sent if beat is not None else {},
        last_end=end,
    )


def _standby(child: Child | Spare, host: str) -> StandbyStatus:
    return StandbyStatus(
        role=child.identity.role.value,
        pid=child.pid,
        state="standby" if child.loaded else "loading",
        uptime_s=round(time.time() - child.started_s, 3),
        rss_bytes=_rss_of_late(child.pid, int(time.monotonic() / STANDBYS_S)),
        host=host,
    )


@cache
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


@lru_cache(maxsize=64)
def _rss_of_late(pid: int, _turn: int) -> int:
    """Read once in each turn: a standby does nothing."""
    return _rss(pid)


def _rss(pid: int) -> int:
    """Read from where psutil reads it too, which asks much more of the system before."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def death(identity: Identity, ends: Mapping[Identity, str], *, is_started_again: bool) -> tuple[str, str]:
    """What the operator reads of it, and the level of that line. `ends`: how the last incarnation of each has ended."""
    if not is_started_again:
        return f"{identity} has left", "info"
    return f"{identity} died and is started again ({ends.get(identity, '')})", "error"
