"""The tree is the architecture: folders, links and the installed package agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshlm.runtime.extras import how_to_install

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "architectures",
    "frontend",
    "coordinator",
    "scheduler_proc",
    "workers",
    "detokenizer",
    "kernels",
    "mediaproc",
    "protocol",
    "runtime",
    "store",
    "supervisor",
}


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """MeshLM is on no index, and its name there is anybody's: who says `pip install meshlm` invites a stranger's code."""
    told = re.compile(r"""pip3? install[^\n`]*["' ]meshlm\b""")
    named = re.compile(r"""["'( ]meshlm\[\w""")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [
        ROOT / name for name in tracked.split("\0") if name.endswith((".py", ".md", ".toml", ".yaml", ".sh", "file"))
    ]
    own = {Path(__file__), ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"}
    texts = {file: file.read_text("utf-8") for file in files if file not in own and file.is_file()}
    assert [str(file) for file, text in texts.items() if told.search(text) or named.search(text)] == []
    assert len(texts) > 500


@pytest.mark.parametrize("extra", ["audio", "grpc", "media", "objects", "otel", "top", "transformers"])
def test_what_is_missing_is_installed_by_its_own_name(extra: str) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert how_to_install(extra) == f"pip install {' '.join(repr(name) for name in wanted)}"
    assert how_to_install("nothing") == "pip install '.[nothing]' in MeshLM's source tree"


def test_every_folder_has_its_link() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src/meshlm").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in FOLDERS}


def test_links_are_relative() -> None:
    for name in FOLDERS:
        assert not (ROOT / "src/meshlm" / name).readlink().is_absolute()


def test_kernels_package_is_empty() -> None:
    assert (ROOT / "kernels/__init__.py").read_text() == ""


def test_the_root_is_not_importable() -> None:
    """transformers looks for a top-level package called `kernels`."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('kernels') is not None)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, check=False).returncode == 0


def test_data_of_kernels_is_packaged() -> None:
    """Tables of measured constants and the C source: what the code reads beside itself must be in the wheel."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["meshlm"]
    needed = {
        path.suffix for path in (ROOT / "kernels").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert needed - {".py"} <= {pattern.removeprefix("**/*") for pattern in patterns}


def test_modules_that_tests_share_have_names_of_their_own() -> None:
    """Their folders stand on sys.path: of two modules with one name all would get the one that came first."""
    shared = [
        path.name for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith(("test_", "conftest", "__"))
    ]
    assert sorted(shared) == sorted(set(shared))


def test_python_m_meshlm_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "meshlm", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("meshlm ")


def test_the_tests_have_the_rooms_of_the_product() -> None:
    """tests/<process>/<room> tests <process>/<room>; support/ is theirs, and cuda/ and group/support what needs a GPU or a bench."""
    for name in FOLDERS - {"kernels"}:
        rooms = {path.name for path in (ROOT / name).iterdir() if path.is_dir() and (path / "__init__.py").exists()}
        tested = {path.name for path in (ROOT / "tests" / name).iterdir() if any(path.glob("test_*.py"))}
        assert tested <= rooms | {"cuda"}, f"tests/{name}"
