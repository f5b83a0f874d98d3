"""A kernel cache that cannot be read costs one compilation, and one line in the log."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.cuda.start import retry_without


class Maker:
    """Fails as told, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "engine"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernel.cubin").write_bytes(b"half a")
    return folder


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        ValueError("Expecting value: line 1 column 1 (char 0)"),
        ImportError("cuda_utils.so: file too short"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_set_aside_once(cache: Path, error: Exception) -> None:
    make = Maker(error)
    with capture_logs() as logs:
        assert retry_without(make, cache) == "engine"
    assert make.calls == 2
    assert not cache.exists()
    (aside,) = cache.parent.iterdir()
    assert (aside / "kernel.cubin").read_bytes() == b"half a"
    (line,) = logs
    assert line["cache"] == str(cache)
    assert line["kept_as"] == str(aside)


def test_the_second_failure_is_the_answer(cache: Path) -> None:
    make = Maker(ValueError("first"), ValueError("second"))
    with pytest.raises(ValueError, match="second"):
        retry_without(make, cache)
    assert make.calls == 2


def test_one_of_a_group_does_not_start_over(cache: Path) -> None:
    make = Maker(ValueError("bad"))
    with pytest.raises(ProcessFatal, match=r"the kernel cache .* was broken \(ValueError: bad\); .*: start again"):
        retry_without(make, cache, alone=False)
    assert make.calls == 1
    assert not cache.exists()


@pytest.mark.parametrize("made_again", [False, True])
def test_what_another_worker_has_set_aside_is_not_moved_again(cache: Path, made_again: bool) -> None:
    """Its kernels may be half written already, by workers that do not fail."""
    aside = cache.with_name("cache.broken-1")
    calls: list[None] = []

    def make() -> str:
        calls.append(None)
        if len(calls) == 1:
            cache.rename(aside)
            if made_again:
                cache.mkdir()
            raise FileNotFoundError("kernel.source")
        return "engine"

    assert retry_without(make, cache) == "engine"
    assert cache.exists() == made_again
    assert [path for path in cache.parent.iterdir() if path != cache] == [aside]


class OutOfResources(Exception):
    """As Triton calls it."""


@pytest.mark.parametrize(
    "error",
    [RuntimeError("ours"), ProcessFatal("for the user"), torch.OutOfMemoryError("full"), OutOfResources("memory")],
    ids=repr,
)
def test_other_failures_leave_it_alone(cache: Path, error: Exception) -> None:
    make = Maker(error)
    with pytest.raises(type(error)):
        retry_without(make, cache)
    assert make.calls == 1
    assert cache.exists()


def test_without_a_cache_there_is_nothing_to_blame(tmp_path: Path) -> None:
    make = Maker(ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        retry_without(make, tmp_path / "none")
    assert make.calls == 1


def test_what_the_process_has_loaded_is_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(device_caches={0: "a kernel that cannot be launched"})
    module = ModuleType("meshlm.kernels.broken")
    module.kernel = loaded  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "meshlm.kernels.broken", module)
    retry_without(Maker(ValueError("bad")), cache)
    assert not loaded.device_caches
