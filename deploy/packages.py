"""Builds the sdist and, from it, the wheel: the same bytes each time for the same sources and the same SOURCE_DATE_EPOCH.

    python -P deploy/packages.py DIST

Needs setuptools and nothing from a network. The sources are copied first, so nothing is left in the tree.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE", "src")
EPOCH = "1767225600"  # 2026-01-01, where nobody says another time


def sources() -> list[Path]:
    """All that a package is made of; src/meshlm has links to the folders of the tree."""
    linked = sorted(path.resolve() for path in (ROOT / "src/meshlm").iterdir() if path.is_symlink())
    return [*(ROOT / name for name in FILES), *linked]


def build(dist: Path) -> list[Path]:
    """The sdist and the wheel."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH))
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree, made = Path(folder) / "tree", Path(folder) / "made"
        _copy(tree)
        made.mkdir()
        sdist = _plain(made / _backend("build_sdist", tree, made, epoch), dist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder) / sdist.name.removesuffix(".tar.gz")
        wheel = made / _backend("build_wheel", unpacked, made, epoch)
        shutil.copy(wheel, dist / wheel.name)
    return [sdist, dist / wheel.name]


def _copy(tree: Path) -> None:
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in sources():
        if path.is_dir():
            shutil.copytree(path, tree / path.relative_to(ROOT), symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, tree)
    for path in tree.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def _backend(hook: str, tree: Path, made: Path, epoch: int) -> str:
    """Calls setuptools in `tree`; the name of what it made."""
    program = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]), file=sys.stderr)"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, str(made)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{hook}: {done.stderr}")
    return done.stderr.strip().splitlines()[-1]


def _plain(sdist: Path, dist: Path, epoch: int) -> Path:
    """The same archive in order of names, with one time and nobody's name in it."""
    out = io.BytesIO()
    with tarfile.open(sdist) as before, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as after:
        for member in sorted(before.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    found = dist / sdist.name
    found.write_bytes(gzip.compress(out.getvalue(), mtime=epoch))
    return found


if __name__ == "__main__":
    os.umask(0o022)  # archives hold the modes of files
    for one in build(Path(sys.argv[1])):
        print(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one}")
