"""The shared numbers' files have their room before they are mapped: a full disk is an answer, not the end of the process."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshlm.runtime.process import metrics

MANY_RANKS = """
import os, sys
from meshlm.runtime.process.metrics import prepare
assert prepare(sys.argv[1], 64) == ""
from meshlm.frontend.observe.metrics import Metrics, exposition
from meshlm.protocol.edges.control import GraphCounts, MeshStats, RankStats
metrics = Metrics("the name of a model, as long as they are", 1 << 20, range(64))
graphs = GraphCounts({"decode": 1, "mixed": 1}, dict.fromkeys("abcdefgh", 1), 1 << 60)
for life in (1 << 60, 2 << 60):
    ranks = tuple(RankStats(rank, 1, 0, 0.5, 0, 0, 4, 0, 0, graphs, incarnation=life) for rank in range(64))
    metrics.mesh(MeshStats(True, ranks=ranks))
assert b"num_requests_running" in exposition()
"""


def test_what_many_ranks_need_is_reserved(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-P", "-c", MANY_RANKS, str(tmp_path)], check=True, timeout=300)
    files = sorted((tmp_path / "metrics").iterdir())
    assert [file.name.rpartition("_")[0] for file in files] == sorted(metrics.RESERVED_BYTES)
    for file in files:
        reserved = metrics.reserved_bytes(file.name.rpartition("_")[0], 64)
        used = int.from_bytes(file.read_bytes()[:4], sys.byteorder)
        assert 8 < used <= reserved, file.name
        info = file.stat()
        assert info.st_size == reserved, "it grew"
        assert 512 * info.st_blocks >= reserved, "a sparse file"


def test_without_room_the_numbers_are_the_process_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, begin: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "of something else")
    assert metrics.prepare(str(tmp_path), 1) == f"{tmp_path}/metrics: No space left on device"
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    assert list((tmp_path / "metrics").iterdir()) == []
