"""The memory that may still be taken: of a host with a full page cache, and in control groups of both versions."""

from pathlib import Path

import pytest

from meshlm.runtime import platforms
from meshlm.runtime.process import host_memory
from meshlm.runtime.process.host_memory import available, total

GIB = 1 << 30
MEMINFO = (
    f"MemTotal: {24 * GIB >> 10} kB\nMemFree: {416 << 10} kB\nMemAvailable: {23 * GIB >> 10} kB\nHugePages_Total: 0\n"
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(MEMINFO)
    return folder


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_the_page_cache_is_available(proc: Path, tmp_path: Path) -> None:
    assert available(proc, tmp_path / "none") == 23 * GIB
    assert total(proc, tmp_path / "none") == 24 * GIB


@pytest.mark.parametrize("path", ["/a/b", "/", "/of/the/host"])
def test_version_2(proc: Path, tmp_path: Path, path: str) -> None:
    """In a container the path may be the host's, and the mount the group's own."""
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    mount = tmp_path / "cgroup"
    group(
        mount if path != "/a/b" else mount / "a",
        max=8 * GIB,
        current=7 * GIB,
        stat=f"anon {GIB}\ninactive_file {5 * GIB}",
    )
    group(mount / "a" / "b", max="max", current=6 * GIB)
    assert (available(proc, mount), total(proc, mount)) == (6 * GIB, 8 * GIB)


def test_version_1_and_the_least_of_all_groups(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/p/q\n0::/\n")
    mount = tmp_path / "cgroup"
    group(mount / "memory", limit_in_bytes=0x7FFF_FFFF_FFFF_F000, usage_in_bytes=9 * GIB)
    group(mount / "memory" / "p", limit_in_bytes=4 * GIB, usage_in_bytes=3 * GIB, stat=f"total_inactive_file {GIB}")
    group(mount / "memory" / "p" / "q", limit_in_bytes=5 * GIB, usage_in_bytes=GIB)
    assert (available(proc, mount), total(proc, mount)) == (2 * GIB, 4 * GIB)
    group(mount / "memory" / "p", limit_in_bytes=4 * GIB, usage_in_bytes=6 * GIB)
    assert available(proc, mount) == 0


def test_the_cpus_kv_cache_is_a_quarter_of_it(monkeypatch: pytest.MonkeyPatch, proc: Path, tmp_path: Path) -> None:
    """A machine whose page cache is full has memory, and a container has no more than its limit."""
    monkeypatch.setattr(host_memory, "PROC", proc)
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    assert platforms.named("cpu").kv_cache_bytes() == 4 * GIB
    (proc / "self" / "cgroup").write_text("0::/\n")
    group(tmp_path / "cgroup", max=2 * GIB, current=0)
    assert platforms.named("cpu").kv_cache_bytes() == GIB // 2
