"""A general plug-in: every process of the mesh calls it before anything else. This one leaves a note, where it is told a folder."""

import os
from pathlib import Path


def hello() -> None:
    if folder := os.environ.get("MESHLM_TINY_NOTES"):
        (Path(folder) / f"hello-{os.getpid()}").touch()
