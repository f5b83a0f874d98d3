"""Kernels are compiled side by side, ahead of their launch: for an H200 that need not be there, whose driver only counts."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction

from meshlm.kernels import precompile
from meshlm.kernels.precompile import launchers_apart, parsed_in_turn, precompiled

PATCHED = (tl, tl.core, tl.math, *(value for value in vars(tl.core).values() if isinstance(value, type)))
COMPILED = [(owner, dict(vars(owner))) for owner in PATCHED]  # no test has run yet


def copy(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def double(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * 2)


def wrong(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, BLOCK), missing + x)  # type: ignore[name-defined]  # noqa: F821


class Driver:
    """What Triton asks a driver for, of a GPU of compute capability 9.0."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.compiled: list[str] = []  # names of threads
        self.looked_up: list[str] = []  # the same, where it was compiled already or not
        self.utils = self
        self.loading: Callable[[], object] = lambda: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name: str, *_: object) -> tuple[int, int, int, int, int]:
        self.loading()
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: self.launched.append(source.fn.__name__)


def undo_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter leaves some of the language patched when a kernel has called another function of Triton's."""
    for owner, attributes in COMPILED:
        for name in vars(owner).keys() - attributes.keys():
            monkeypatch.delattr(owner, name)
        for name, value in attributes.items():
            if vars(owner).get(name) is not value:
                monkeypatch.setattr(owner, name, value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    undo_interpreter(monkeypatch)
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # no device to set
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where it is not said

    def compiled(*, cache_hit: bool, **_: object) -> None:
        fake.looked_up.append(threading.current_thread().name)
        if not cache_hit:
            fake.compiled.append(threading.current_thread().name)

    monkeypatch.setattr(knobs.compilation, "listener", compiled)
    yield fake
    gc.collect()  # kernels go before their driver does


def launch(kernel: Any, block: int = 16) -> None:
    x = torch.empty(block)
    kernel[(1,)](x, torch.empty(block), BLOCK=block)


def test_variants_are_compiled_and_loaded_by_several_threads_and_not_launched(gpu: Driver) -> None:
    """No thread gets on before two kernels are being loaded."""
    kernels = [JITFunction(copy), JITFunction(double)]
    gpu.loading = threading.Barrier(2, timeout=60).wait
    news: list[tuple[int, int]] = []
    with precompiled(lambda done, total: news.append((done, total)), threads=2):
        for kernel in kernels * 3:
            launch(kernel)
    assert gpu.launched == []
    assert len(gpu.compiled) == 2
    assert all(name.startswith("kernels") for name in gpu.compiled)
    assert news[-1:] in ([(2, 2)], [])
    gpu.loading = pytest.fail
    for kernel in kernels:
        launch(kernel)
    assert gpu.launched == ["copy", "double"]
    assert len(gpu.compiled) == 2


def test_each_variant_is_one(gpu: Driver) -> None:
    kernel = JITFunction(copy)
    with precompiled(threads=2):
        for block in (16, 32, 16, 64, 32):
            launch(kernel, block)
    assert len(gpu.compiled) == 3
    launch(kernel, 128)
    assert gpu.compiled[3:] == ["MainThread"]
    assert gpu.launched == ["copy"]


def test_a_variant_that_is_asked_for_in_other_words_is_not_compiled_again(gpu: Driver) -> None:
    """4 warps are the default. Triton 3.6 looks a variant up by the words of its launch."""
    kernel = JITFunction(copy)
    x, out = torch.empty(16), torch.empty(16)

    def both() -> None:
        kernel[(1,)](x, out, BLOCK=16)
        kernel[(1,)](x, out, BLOCK=16, num_warps=4)

    with precompiled(threads=2):
        both()
    looked_up = len(gpu.looked_up)
    both()
    assert gpu.launched == ["copy", "copy"]
    assert len(gpu.looked_up) == looked_up


def test_what_cannot_be_compiled_says_so_when_it_is_launched(gpu: Driver, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = JITFunction(wrong), JITFunction(copy)
    with precompiled(threads=2):
        launch(bad)
        launch(good)
    assert "1 of 2 kernels are not compiled ahead: CompilationError" in caplog.text
    launch(good)
    with pytest.raises(CompilationError, match="missing is not defined"):
        launch(bad)
    assert gpu.launched == ["copy"]


def test_what_cannot_be_loaded_says_so_too(gpu: Driver) -> None:
    """Never is a kernel half loaded."""

    def broken() -> None:
        raise RuntimeError("device kernel image is invalid")

    kernel = JITFunction(copy)
    gpu.loading = broken
    with precompiled(threads=1):
        launch(kernel)
    with pytest.raises(RuntimeError, match="image is invalid"):
        launch(kernel)
    assert gpu.launched == []


def test_an_error_between_launches_leaves_them_as_they_were(gpu: Driver) -> None:
    kernel = JITFunction(copy)

    def fail() -> None:
        with precompiled(threads=1):
            launch(kernel)
            raise torch.OutOfMemoryError

    for _ in range(2):  # the mode is left as well
        with pytest.raises(torch.OutOfMemoryError):
            fail()
    assert gpu.launched == []
    launch(kernel)
    assert gpu.launched == ["copy"]


def test_a_triton_that_cannot_do_it_launches(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_mode", lambda: None)
    with precompiled():
        launch(JITFunction(copy))
    assert gpu.launched == ["copy"]
    assert gpu.compiled == ["MainThread"]


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "twin", NULL, -1, methods};
PyMODINIT_FUNC PyInit_twin(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_that_is_loaded_again_is_nobody_elses(tmp_path: Path) -> None:
    """One is loaded, another, then the first again, before the other's function is taken from its module."""
    files = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "twin.c").write_text(LAUNCHER.replace("NUMBER", str(number)))
        files.append(build._build("twin", str(folder / "twin.c"), str(folder), [], [], [], []))
    first, second = files
    with launchers_apart():
        modules = [build._load_module_from_path("twin", path) for path in (first, second, first)]
    assert [module.launch() for module in modules] == [1, 2, 1]


def test_one_thread_parses_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []

    def parse(kernel: None) -> int:
        inside.append(1)
        for _ in range(100):
            os.sched_yield()  # another thread's turn
        found = len(inside)
        inside.pop()
        return found

    monkeypatch.setattr(JITCallable, "parse", parse)
    with parsed_in_turn(), ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: JITCallable.parse(None), range(200))) == {1}
    assert JITCallable.parse is parse, "as it was"


def test_this_triton_can() -> None:
    assert precompile._mode() is not None
