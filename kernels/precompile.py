"""Compiles the kernels that a piece of code launches, several at a time, without launching them.

A start with an empty cache needs dozens of variants, and a launch waits for its own: they would be compiled one after the
other. Inside `precompiled` a launch only hands its variant to other threads, by Triton's AsyncCompileMode. About a seventh
of their work, the front end, needs Python's lock. What is no launch of Triton's happens as ever, in buffers that no kernel has
filled: nothing that only a kernel writes may be an index of torch's there.

Used by a worker before its warm-up (workers/engine/triton_kit.py) and by tuners, in the one thread that launches.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from triton.runtime import build, jit

THREADS = 8  # at most: then the front end of one or the other always has Python's lock
Progress = Callable[[int, int], None]  # done, of how many
_log = logging.getLogger("meshlm.kernels")


def _mode() -> Any:
    """Triton's class; None in a Triton that has none like it (it is not public before 3.9)."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode

        known = list(signature(AsyncCompileMode.submit).parameters)[1:4] == ["key", "compile_fn", "finalize_fn"]
    except (ImportError, AttributeError):
        known = False
    return AsyncCompileMode if known else None


@contextmanager
def precompiled(progress: Progress = lambda done, total: None, threads: int | None = None) -> Iterator[None]:
    """Inside nothing is launched; afterwards what would have been is compiled and loaded.

    What cannot be compiled or loaded is said again by its launch. progress: while there is something to wait for. Where Triton has no
    such mode, launches are launches."""
    mode_class = _mode()
    if mode_class is None:
        yield
        return
    function: Any = jit.JITFunction
    launch = function.run

    def only_compile(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    with (
        launchers_apart(),
        parsed_in_turn(),
        _pool(threads or min(THREADS, len(os.sched_getaffinity(0)))) as pool,
        _ahead(mode_class, pool) as mode,
    ):
        function.run = only_compile
        try:
            yield
        finally:
            function.run = launch
        _wait(mode.raw_futures, progress)


@contextmanager
def launchers_apart() -> Iterator[None]:
    """Each launcher that is loaded inside is a module of its own.

    Triton's (3.6) are files of one name in C, whose modules are of the old kind (single-phase initialisation): when a file is loaded
    for the second time, CPython fills the module that was loaded last under the name with that file's functions. A thread that has
    loaded another file and is about to take its function from there would get the wrong one."""
    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None:  # not public: a Triton that loads its files some other way
        yield
        return

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            copy = ModuleType(name)
            vars(copy).update(vars(load(name, path)))
            return copy

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextmanager
def parsed_in_turn() -> Iterator[None]:
    """Inside one thread at a time has Python parse a kernel's source.

    CPython 3.11 counts how deep it is in a syntax tree for all threads together: a second one that begins while the first has given its
    lock away ends with "AST constructor recursion depth mismatch"."""
    function: Any = jit.JITCallable
    parse, lock = function.parse, threading.Lock()

    def parse_in_turn(self: Any) -> Any:
        with lock:
            return parse(self)

    function.parse = parse_in_turn
    try:
        yield
    finally:
        function.parse = parse


def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads load kernels for the GPU of this thread."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(threads, "kernels")
    return ThreadPoolExecutor(threads, "kernels", torch.cuda.set_device, (torch.cuda.current_device(),))


def _ahead(mode_class: Any, pool: ThreadPoolExecutor) -> Any:
    """Triton's mode, with what it leaves to the first launch done in the threads too."""
    locks: dict[Any, threading.Lock] = {}

    class Ahead(mode_class):  # type: ignore[misc]
        def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Any, *more: Any) -> Any:
            kernel = super().submit(key, lambda: _loaded(compile_fn(), locks), finalize_fn, *more)
            # as 3.9: the next launch of it, in the same words, finds this and need not work out the key again
            finalize_fn(kernel)
            return kernel

    return Ahead(pool, ignore_errors=True)


def _loaded(kernel: Any, locks: dict[Any, threading.Lock]) -> Any:
    """Its code on the GPU and its launcher built, which in 3.6 a C compiler does: once for all variants with the same arguments."""
    with locks.setdefault(kernel.src.fn, threading.Lock()):
        kernel.run  # noqa: B018 (a property that does all this)
    return kernel


def _wait(futures: list[Future[Any]], progress: Progress) -> None:
    left = [future for future in futures if not future.done()]
    for done, _ in enumerate(as_completed(left), len(futures) - len(left) + 1):
        progress(done, len(futures))
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        first = f"{type(errors[0]).__name__}: {next(iter(str(errors[0]).splitlines()), '')}"
        _log.warning("%d of %d kernels are not compiled ahead: %s", len(errors), len(futures), first)
