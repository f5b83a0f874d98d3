"""How much memory this process may still take: what the kernel can free counts, and so do the limits of its control groups.

MemFree is little on any machine that has read files for a while, since its page cache is given up only when somebody asks for memory.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class _Version(NamedTuple):
    """The files of one version of control groups, in the mounts where it may be."""

    mounts: tuple[str, ...]
    limit: str
    used: str
    reclaimable: str  # in memory.stat: files that are read again when they are needed


V2 = _Version((".", "unified"), "memory.max", "memory.current", "inactive_file")
V1 = _Version(("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available(proc: Path | None = None, cgroups: Path | None = None) -> int:
    """Bytes that this process may take without that anything is swapped or killed."""
    proc = proc or PROC
    left = [limit - used for limit, used in _groups(proc, cgroups or CGROUPS)]
    return max(0, min([_of_host(proc), *left]))


def total(proc: Path | None = None, cgroups: Path | None = None) -> int:
    """Bytes that there are for this process and those in its control groups."""
    proc = proc or PROC
    whole = _meminfo(proc).get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *(limit for limit, _ in _groups(proc, cgroups or CGROUPS))])


def _of_host(proc: Path) -> int:
    found = _meminfo(proc).get("MemAvailable")  # since Linux 3.14
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(proc / "meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[1].isdecimal()}


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that this process is in, its parents' too, and what of it cannot be freed."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version = V2 if number == "0" else V1
        for mount in version.mounts:
            yield from _limits(cgroups / mount, path, version)


def _limits(mount: Path, path: str, version: _Version) -> Iterator[tuple[int, int]]:
    # In a container the mount may begin at its own group, whose path is then of no use: the root is looked at in any case.
    inner = PurePosixPath(path.lstrip("/"))
    for group in (inner, *inner.parents) if inner.parts else (inner,):
        folder = mount / group
        limit, used = _text(folder / version.limit).strip(), _text(folder / version.used).strip()
        if limit.isdecimal() and used.isdecimal():  # "max" is none
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if len(line.split()) == 2)
            yield int(limit), int(used) - int(stat.get(version.reclaimable, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
