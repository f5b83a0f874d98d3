"""Traces hold the operations between start and stop; misuse is an answer, not an exception."""

import json
from pathlib import Path

import torch

from meshlm.protocol.control_edge import Profile
from meshlm.workers.profiler import Profiler


def test_a_trace_of_what_ran(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path / "new"), "worker-0")
    assert profiler.handle(Profile(1, True)).error == ""
    torch.ones(3).cumsum(0)
    answer = profiler.handle(Profile(2, False))
    assert (answer.handle, answer.error) == (2, "")
    (path,) = answer.paths
    assert Path(path).name.startswith("worker-0.")
    names = {event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert "aten::cumsum" in names


def test_misuse_is_answered(tmp_path: Path) -> None:
    assert "--profiler-dir" in Profiler("", "worker-0").handle(Profile(1, True)).error
    profiler = Profiler(str(tmp_path), "worker-0")
    assert profiler.handle(Profile(1, False)).error == "worker-0: the profiler is not running"
    profiler.handle(Profile(1, True))
    assert profiler.handle(Profile(1, True)).error == "worker-0: the profiler is running already"
    assert profiler.handle(Profile(1, False)).paths
    (tmp_path / "file").write_text("")
    assert "--profiler-dir" in Profiler(str(tmp_path / "file"), "worker-0").handle(Profile(1, True)).error
