"""Kinds of devices: those that are built in, and one of an installed package."""

import itertools
from pathlib import Path

import pytest
from tiny_models import spec_of

from meshlm.protocol.config import ParallelConfig
from meshlm.runtime import platforms, plugins
from meshlm.runtime.plugins import PluginError
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, parallel, resolve

_numbers = itertools.count()
SOURCE = """
from meshlm.runtime.platforms import Platform
class Board(Platform):
    name, engine = {name!r}, {engine!r}
    max_num_seqs, max_num_batched_tokens = 5, 77
    def num_devices(self, environment):
        return 2
    def default_dtype(self, of_model, *, float16):
        return "bfloat16"
BOARD = Board()
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", set())
    plugins._installed.cache_clear()
    monkeypatch.setattr(platforms, "_platforms", dict(platforms._platforms))


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str = "board", group: str = plugins.PLATFORMS, **source: str
) -> None:
    module = f"board_{next(_numbers)}"
    given = {"name": "board", "engine": "board.engine:make", **source}
    (folder / f"{module}.py").write_text(SOURCE.format(**given))
    info = folder / "board-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: board\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry} = {module}:BOARD\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_package_brings_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    assert platforms.names() == ["auto", "cpu", "cuda", "fake", "board"]
    found = resolve.resolve(flags.build({"device": "board"}, None)).resolved
    assert found is not None
    assert (found.device, found.dtype, found.max_num_seqs, found.max_num_batched_tokens) == ("board", "bfloat16", 5, 77)
    with pytest.raises(UsageError, match=r"--data-parallel-size 3 needs 3 GPUs.*; this host shows 2"):
        parallel.check(ParallelConfig(data_parallel_size=3), spec_of(), "board", 3)
    with pytest.raises(UsageError, match="--device board: its workers form no groups; leave out -tp"):
        parallel.check(ParallelConfig(tensor_parallel_size=2), spec_of(), "board", 2)
    for wrong, text in (
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: --device board keeps no keys"),
        ({"compile": "inductor"}, "--compile"),
    ):
        with pytest.raises(UsageError, match=text):
            resolve.resolve(flags.build({"device": "board", **wrong}, None))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"entry": "cpu"}, "plug-in cpu .*--device cpu is taken already"),
        ({"name": "other"}, "ValueError: the platform is called 'other', and its entry point 'board'"),
        ({"engine": "board.engine"}, "ValueError: engine 'board.engine': module:function is expected"),
        ({"group": "meshlm.samplers"}, r"plug-in board \(board 1.0, group meshlm.samplers\): no such group"),
    ],
)
def test_what_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], says: str
) -> None:
    install(tmp_path, monkeypatch, **given)
    with pytest.raises(UsageError, match=says):
        resolve.resolve(flags.build({"device": "board"}, None))


def test_a_device_that_nobody_has() -> None:
    with pytest.raises(UsageError, match=r"--device tpu: there are auto, cpu, cuda, fake$"):
        resolve.resolve(flags.build({"device": "tpu"}, None))
    with pytest.raises(PluginError, match="--device tpu"):
        platforms.named("tpu")
