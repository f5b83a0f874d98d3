"""The first lines of every process of the mesh: it ends when the process that started it does, from here on and before. Once the
mesh was ready it may be told to outlive that (orphan.py).

`python -m meshlm.runtime.process.entry FOLDER PARENT ...` runs meshlm.FOLDER as a child of the process PARENT. Imports nothing but
the standard library until the kernel has been asked for the parent's death: a parent that dies during the imports would leave a
process that nobody ends.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, and end it at once when that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # a parent that is gone is replaced, by init or another process that was there before
        os._exit(1)


def outlive(parent: int) -> None:
    """Take that back, where `parent` is it. Only for the main thread, which asked for it."""
    if os.getppid() == parent:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def give_back_memory() -> None:
    """Gives freed memory of the start-up back to the system; the C library would keep 55 MiB of parsing a large vocabulary."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def import_structlog() -> None:
    """Import it without rich, which it would import where that is installed, to draw tracebacks that none of our lines has: that is
    70 ms of CPU in each process. Only for processes of the mesh: a program that uses `meshlm.LLM` keeps the structlog that it has."""
    if "structlog" not in sys.modules and "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # how Python is told that a module cannot be imported
        import structlog  # noqa: F401

        del sys.modules["rich"]


def main() -> None:
    """Become the process that the arguments name."""
    folder, parent = sys.argv[1:3]
    del sys.argv[1:3]
    die_with(int(parent))
    import_structlog()
    import importlib

    importlib.import_module(f"meshlm.{folder}.__main__")


if __name__ == "__main__":
    main()
