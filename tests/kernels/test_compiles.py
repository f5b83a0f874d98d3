"""Kernels compile for a Hopper GPU, by the Triton that is installed and by the oldest one that may be; also where there is no GPU.

The interpreter takes much that a compiler refuses, and each Triton refuses something else: GPUs have other versions than this machine.
The oldest one, which knows the least, gets every kernel that a test launches.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OLDEST = "triton-3.6.0"  # beside the packages of the virtual environment (Makefile)
LEFT_OUT = (
    "test_allreduce_rmsnorm.py",  # ranks that wait for one another: support/compiled.py has their kernels
    "test_compiles.py",
    "test_cpu_packed.py",
    "test_cpu_self_test.py",
    "test_cpu_rounded.py",
    "test_gemv_parts.py",  # likewise
    "test_ggml.py",
    "test_precompile.py",  # has kernels that must not compile
    "test_tables.py",
    "test_tuning.py",
)


def environment(triton: str, folder: Path) -> dict[str, str]:
    """Of a process with this Triton and nothing compiled."""
    found = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    path = [str(HERE / "support")]
    if triton == "oldest":
        installed = Path(sys.prefix) / OLDEST
        if not installed.exists():
            pytest.skip(f"{OLDEST} is not there: `make test` fetches it")
        path.insert(0, str(installed))
    found["TRITON_DEFAULT_FP_FUSION"] = "1"  # as workers have it (supervisor/processes/children.py)
    return {**found, "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(path)}


SECTIONS = [
    ("products", 19),
    ("sums", 4),
    ("attention", 50),
    ("exchange", 6),
    ("states", 13),
    ("hopper", 16),
    ("roundings", 3),
    ("two_parts", 4),
]
LAUNCHED_BY_TESTS = ("products", "attention")


@pytest.mark.parametrize(
    ("triton", "what", "least"),
    [("installed", *section) for section in SECTIONS]
    + [("oldest", *section) for section in SECTIONS if section[0] not in LAUNCHED_BY_TESTS],
)
def test_kernels_compile(triton: str, what: str, least: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "support/compiled.py"), what],
        env=environment(triton, tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) >= least, done.stdout


def test_kernels_of_all_tests_compile(tmp_path: Path) -> None:
    tests = [str(path) for path in sorted(HERE.glob("test_*.py")) if path.name not in LEFT_OUT]
    tests += [
        str(HERE.parent / "workers" / "attention" / name) for name in ("test_triton_latent.py", "test_triton_sparse.py")
    ]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=no", "-p", "compile_only", "-p", "no:cacheprovider"]
    command.append("--assert=plain")  # to say how thousands of numbers that nobody computed differ can take minutes
    found = tmp_path / "compiled"
    variables = {**environment("oldest", tmp_path), "COMPILED": str(found)}
    done = subprocess.run([*command, *tests], env=variables, capture_output=True, text=True, check=False)
    assert found.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    lines = found.read_text().splitlines()
    assert not [line for line in lines if " " in line]
    assert len(lines) >= 64, f"{lines}, exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
