"""A plug-in of `meshlm.general` of which a process dies at its start, as with a broken driver, once a script wishes so.

The file at $DIES_AT_START names the role whose next incarnations die. Put on a mesh's path by `install`.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

DIES_AT_START = "DIES_AT_START"


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH with this as an installed package."""
    shutil.copy(__file__, folder / "start_plugin.py")
    info = folder / "start_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: start-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[meshlm.general]\nstart = start_plugin:arm\n")
    return folder


def arm() -> None:
    """In each process, before anything of it is there; the script's own has no identity."""
    role = " ".join(sys.argv).partition("--identity ")[2].partition("/")[0]
    wish = Path(os.environ[DIES_AT_START])
    if role and wish.exists() and wish.read_text() == role:
        os.kill(os.getpid(), signal.SIGSEGV)
