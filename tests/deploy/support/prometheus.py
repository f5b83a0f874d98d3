"""Prometheus and promtool, as Debian and Ubuntu package them: unpacked beside the environment, never installed.

.venv/bin/python -P tests/deploy/support/prometheus.py    fetches them (make setup does).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(sys.prefix) / ".prometheus"
BINARIES = FOLDER / "usr" / "bin"


class Absent(Exception):
    """It cannot be had here; the text says why."""


def find() -> Path:
    """The folder with both programs: those on PATH, or unpacked. Absent."""
    if (promtool := shutil.which("promtool")) and shutil.which("prometheus"):
        return Path(promtool).parent
    if not (BINARIES / "promtool").exists():
        _fetch()
    return BINARIES


def _fetch() -> None:
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise Absent(f"prometheus: not installed, and {' and '.join(missing)} are not there to fetch the package")
    with tempfile.TemporaryDirectory() as folder:
        command = ["apt-get", "download", "prometheus"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        packages = list(Path(folder).glob("*.deb"))
        if done.returncode or not packages:
            raise Absent(f"prometheus: apt-get download: {(done.stderr.strip() or 'no package').splitlines()[-1]}")
        new = FOLDER.with_name(f"{FOLDER.name}.{Path(folder).name}")
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(new)], check=True, timeout=300)
        try:
            new.rename(FOLDER)
        except OSError:  # another process was faster
            shutil.rmtree(new)


if __name__ == "__main__":
    try:
        print(find())
    except Absent as why:
        print(f"[setup] {why}: its tests are skipped")
