"""Checks of the host: shared memory, limits, the clock, the compiler, memory. They read and change nothing."""

import ctypes
import os
import resource
import shutil
import sys
import sysconfig
from pathlib import Path

from meshlm.runtime.process import host_memory
from meshlm.supervisor.doctor.findings import Finding, State, failed, ok, warning

GIB = 1 << 30
SHM_NEEDED = 1 << 30  # NCCL's and torch's segments of one host with several GPUs
MEMORY_NEEDED = 4 * GIB
FILES_NEEDED = 4096  # links of 100 processes and some thousand clients
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def findings() -> list[Finding]:
    return [
        python(sys.version_info[:2]),
        shared_memory(Path("/dev/shm")),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        memory(host_memory.total(), host_memory.available()),
        clock(_clock_state()),
        compiler(shutil.which(os.environ.get("CC", "") or "gcc") or shutil.which("cc") or "", _header()),
    ]


def python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if not (3, 11) <= version <= (3, 13):
        return warning("python", found, "MeshLM is tested with Python 3.11 to 3.13")
    return ok("python", found)


def shared_memory(folder: Path) -> Finding:
    """GPUs of one host exchange data through it where they have no direct way."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        advice = f"mount a tmpfs at {folder}; NCCL needs it for several GPUs"
        return failed("shared memory", f"{folder}: {error.strerror}", advice)
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{free / GIB:.1f} GiB of {whole / GIB:.1f} GiB free in {folder}"
    if free < SHM_NEEDED:
        advice = "several GPUs need 1 GiB: docker run --shm-size=1g, or an emptyDir with medium Memory"
        return warning("shared memory", found, advice)
    return ok("shared memory", found)


def open_files(hard: int) -> Finding:
    found = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if hard != resource.RLIM_INFINITY and hard < FILES_NEEDED:
        return warning("open files", found, f"raise the hard limit to {FILES_NEEDED} or more: ulimit -Hn, LimitNOFILE=")
    return ok("open files", found)


def locked_memory(soft: int) -> Finding:
    """RDMA between hosts locks its buffers."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    advice = "InfiniBand between hosts needs it unlimited: ulimit -l, LimitMEMLOCK="
    return Finding("locked memory", State.OK, f"{soft >> 10} KiB", advice)


def memory(whole: int, available: int) -> Finding:
    """Both as far as the limits of control groups let this process have it."""
    found = f"{available / GIB:.1f} of {whole / GIB:.1f} GiB available"
    if available < MEMORY_NEEDED:
        advice = "the processes of a mesh take about 1 GiB, and weights pass through memory on their way"
        return warning("memory", found, f"{advice}; end what else has it, or raise the container's limit")
    return ok("memory", found)


def clock(state: int | None) -> Finding:
    """Deadlines and numbers of incarnations are wall-clock times, which nodes compare."""
    why = "nodes of a mesh need the same time"
    if state is None:
        return warning("clock", "the kernel does not tell whether it is synchronised", f"{why}: run NTP")
    if state == _TIME_ERROR:
        return warning("clock", "not synchronised", f"{why}: run chrony or systemd-timesyncd")
    return ok("clock", "synchronised")


def _clock_state() -> int | None:
    """What adjtimex(2) says; None where it may not be asked."""
    state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    return None if state < 0 else state


def compiler(path: str, header: Path) -> Finding:
    """Kernels are compiled on the machine that runs them."""
    if not path:
        advice = "install gcc (or clang and set CC): kernels are compiled at the first start"
        return failed("compiler", "no C compiler", advice)
    if not header.exists():
        advice = "install Python's headers (python3-dev): Triton's launcher needs them"
        return warning("compiler", f"{path}, but no {header}", advice)
    return ok("compiler", path)


def _header() -> Path:
    return Path(sysconfig.get_path("include")) / "Python.h"
