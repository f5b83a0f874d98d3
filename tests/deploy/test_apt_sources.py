"""The image's base comes from where this machine takes its packages, and from no host that a file names."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    spec = importlib.util.spec_from_file_location("apt_sources", ROOT / "deploy/apt_sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text('NAME="Debian"\nVERSION_CODENAME=bookworm\n')
    return tmp_path


LINES = """
# deb http://old.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb http://security.example/debian bookworm-security main
deb cdrom:[disc]/ bookworm main
deb [arch=amd64 signed-by=/x.gpg] http://own.example/debian/ bookworm main contrib  # ours
deb http://later.example/debian bookworm main
"""
PARAGRAPHS = """
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb deb-src
# a comment
URIs: https://own.example/debian
Suites: bookworm
 bookworm-updates
Components: main
"""


def test_lines(sources: ModuleType, etc: Path) -> None:
    (etc / "apt/sources.list").write_text(LINES)
    assert sources.own_suite(etc) == "bookworm"
    assert sources.mirror_of("bookworm", etc) == "http://own.example/debian"
    assert sources.mirror_of("bookworm-security", etc) == "http://security.example/debian"
    assert sources.mirror_of("trixie", etc) == ""


def test_paragraphs_and_those_of_others(sources: ModuleType, etc: Path) -> None:
    folder = etc / "apt/sources.list.d"
    (folder / "debian.sources").write_text(PARAGRAPHS)
    (folder / "another.list").write_text("deb http://other.example/x bookworm main\n")
    assert sources.mirror_of("bookworm", etc) == "https://own.example/debian"
    assert sources.mirror_of("bookworm-updates", etc) == "https://own.example/debian"


def test_a_machine_that_says_nothing(sources: ModuleType, tmp_path: Path) -> None:
    assert sources.own_suite(tmp_path) == ""
    assert sources.mirror_of("bookworm", tmp_path) == ""


@pytest.mark.parametrize("name", ["image.py", "apt_sources.py", "packages.py", "Dockerfile"])
def test_no_file_names_a_host_of_packages(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text("utf-8")
    assert [host for host in re.findall(r"https?://([\w.-]+)", text) if host != "127.0.0.1"] == []
