"""A plugin of pytest: kernels that tests launch are compiled for a Hopper GPU, which need not be there, and not launched.

    COMPILED=FILE python -P -m pytest --assert=plain -p compile_only tests/kernels/...

What the tests say does not count. FILE gets a line for each kernel, and what the compiler said of those that it refused. Each kernel is
compiled as it is launched first: that takes 40 s for all of them, where all variants take minutes.
"""

import os

import pytest
import triton
from compiled import Hopper
from machine_code import roundings_onto_nothing
from triton.runtime import driver, jit

run = jit.JITFunction.run
found: dict[str, str] = {}


def only_compile(self, *given, grid, warmup, **options):  # type: ignore[no-untyped-def]
    name = f"{self.fn.__module__}.{self.fn.__name__}"
    if name in found:
        return None
    found[name] = ""
    try:
        kernel = run(self, *given, grid=grid, warmup=True, **options)
        asm = getattr(kernel, "asm", {"ptx": ""})  # one that is compiled ahead has none yet
        if "e4m3x2" in asm["ptx"] and (wrong := roundings_onto_nothing(asm["cubin"])):
            found[name] = f"roundings beside what nothing has written: {wrong}"
        return kernel
    except Exception as error:
        found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"
        raise


def pytest_configure() -> None:
    triton.knobs.runtime.interpret = False  # the tests' conftest asks for the interpreter
    driver.set_active(Hopper())
    jit.JITFunction.run = only_compile


def pytest_sessionfinish(session: pytest.Session) -> None:
    with open(os.environ["COMPILED"], "w") as file:
        file.writelines(f"{name} {why}".strip() + "\n" for name, why in sorted(found.items()))
