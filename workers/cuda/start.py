"""What a GPU must have before anything is loaded onto it, and what a start does where Triton's kernels on disk cannot be read.

Broken kernels are set aside and compiled again, once, around the making of the engine, which runs every kernel (engine/make.py).
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from meshlm.runtime.errors import ProcessFatal


def check_gpu() -> None:
    """There is a GPU, and this torch has code for it."""
    if not torch.cuda.is_available():
        raise ProcessFatal("--device cuda: torch sees no GPU (driver, or a CPU build of torch)")
    capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if not runs_on(built, capability):
        raise ProcessFatal(
            f"--device cuda: {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
            f"this torch is built for {', '.join(built)}; use --device cpu or another build of torch"
        )


def runs_on(built: list[str], capability: tuple[int, int]) -> bool:
    """Code for sm_XY runs on X.Y and later minor versions; compute_XY is compiled for anything later."""
    for name in built:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        theirs = (int(digits[:-1]), int(digits[-1]))
        if theirs <= capability and (kind == "compute" or theirs[0] == capability[0]):
            return True
    return not built


T = TypeVar("T")
READING = (ValueError, ImportError, OSError)  # of a damaged .json, a library that is cut short, a file that is gone
_log = structlog.get_logger()


def folder() -> Path:
    """The folder where Triton keeps compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def retry_without(make: Callable[[], T], where: Path, *, alone: bool = True) -> T:
    """make(); once more, with an empty cache, if it failed as it does when a kernel cannot be read.

    alone: no other worker waits in the middle of the first attempt; else the start ends, and the next one will do."""
    before = _inode(where)
    try:
        return make()
    except (ProcessFatal, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Triton and drivers have no class in common; what is no such error is raised again
        moved = before is not None and _inode(where) != before  # by another worker that could not read it
        of_reading = isinstance(error, READING) or (
            isinstance(error, RuntimeError) and str(error).startswith("Triton Error")
        )
        if not of_reading or not (moved or where.is_dir()):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        aside = f"{where}.broken-..." if moved else _set_aside(where)
    if not alone:
        raise ProcessFatal(f"the kernel cache {where} was broken ({reason}); it is now {aside}: start again")
    # Outside the handler: the error's frames hold the first engine, weights and all.
    _log.warning(
        "the kernel cache is broken: kernels are compiled again", cache=str(where), kept_as=aside, error=reason
    )
    _forget_loaded()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return make()


def _inode(where: Path) -> int | None:
    """The inode that tells one folder of this name from another."""
    try:
        return where.stat().st_ino
    except OSError:
        return None


def _set_aside(where: Path) -> str:
    """Moves the folder aside, and gives its new name."""
    aside = where.with_name(f"{where.name}.broken-{time.time_ns()}")
    try:
        where.rename(aside)
    except OSError as error:
        raise ProcessFatal(f"the kernel cache {where} is broken and cannot be set aside: {error.strerror}") from None
    return str(aside)


def _forget_loaded() -> None:
    """Kernels that this process has half loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("meshlm.kernels."):
            for value in vars(module).values():
                caches = getattr(value, "device_caches", None)
                if isinstance(caches, dict):
                    caches.clear()
