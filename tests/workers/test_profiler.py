"""Traces hold the operations between start and stop; misuse is an answer, not an exception."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from meshlm.protocol.operations import OperationDone, OperationId
from meshlm.workers.operations import Profiler


def handle(profiler: Profiler, *, start: bool) -> OperationDone:
    return profiler.handle(OperationId("one"), start=start)


def test_a_trace_of_what_ran(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path / "new"), "worker-0")
    assert handle(profiler, start=True).error == ""
    torch.ones(3).cumsum(0)
    answer = handle(profiler, start=False)
    assert answer.error == ""
    (path,) = answer.paths
    assert Path(path).name.startswith("worker-0.")
    names = {event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert "aten::cumsum" in names


def test_only_who_takes_traces_imports_torch_for_them() -> None:
    script = (
        "import sys; from meshlm.workers.operations import load_profiler; load_profiler(''); assert 'torch' not in sys.modules; "
        "load_profiler('folder'); assert 'torch.profiler' in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, cwd="/", timeout=300)


def test_misuse_is_answered(tmp_path: Path) -> None:
    assert "--profiler-dir" in handle(Profiler("", "worker-0"), start=True).error
    profiler = Profiler(str(tmp_path), "worker-0")
    assert handle(profiler, start=False).error == "worker-0: the profiler is not running"
    handle(profiler, start=True)
    assert handle(profiler, start=True).error == "worker-0: the profiler is running already"
    assert handle(profiler, start=False).paths
    (tmp_path / "file").write_text("")
    assert "--profiler-dir" in handle(Profiler(str(tmp_path / "file"), "worker-0"), start=True).error
