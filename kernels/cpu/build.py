"""Compiles source.c and its headers once for this processor and loads it. The library is kept in the user's cache.

Without a C compiler, or on a processor whose compiler fails, `load` returns None and says why once: plain torch then does the work.
The library uses torch's own OpenMP runtime, so that both share one pool of threads.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("source.c")
# The compiler neither reorders sums nor fuses operations by itself: the result of a row would depend on the loop that it is in.
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=off", "-Wno-psabi"]


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "meshlm" / "cpu"


def _processor() -> str:
    """The facts that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def compile_library(compiler: str, library: Path, flags: list[str]) -> None:
    """Compile, then put it in place in one step: several workers may do it at once. CalledProcessError."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "library.so"
        # Linked without -fopenmp: the OpenMP symbols come from the runtime that torch has loaded.
        subprocess.run(
            [compiler, *flags, "-c", str(SOURCE), "-o", f"{folder}/object.o"], check=True, capture_output=True
        )
        link = [compiler, "-shared", "-o", str(made), f"{folder}/object.o", "-lm"]
        subprocess.run(link, check=True, capture_output=True)
        made.replace(library)


def _openmp() -> None:
    """Make torch's OpenMP symbols visible to our library."""
    for candidate in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
        return
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def compiler() -> str | None:
    """The user's."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@cache
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be (about two seconds, once per machine)."""
    content = b"".join(file.read_bytes() for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))
    key = hashlib.sha256(content + "\0".join([*FLAGS, _processor()]).encode()).hexdigest()[:16]
    library = _cache_dir() / f"kernels-{key}.so"
    try:
        _openmp()
        if not library.exists():
            with_this = compiler()
            if with_this is None:
                raise OSError("no C compiler (cc, gcc or clang)")
            compile_library(with_this, library, FLAGS)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or b""
        text = said.decode("utf-8", "replace").strip().splitlines()
        warnings.warn(f"the CPU kernels are not used: {text[0] if text else error}", RuntimeWarning, stacklevel=2)
        return None
