"""A batch's two files, on this host or behind http(s): the requests are read line by line, the answers are written as they come.

Used by run.py. StartError and UsageError name the flag.
"""

import contextlib
import http.client
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from meshlm.supervisor.errors import StartError, UsageError

UPLOADS, AGAIN_S, UPLOAD_TIMEOUT_S = 5, 5.0, 1000.0
TIMEOUT_S = 60.0  # in which some more of a file must come


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.contextmanager
def requests(name: str) -> Iterator[IO[bytes]]:
    """The input file, -i: open, to be read by lines."""
    try:
        if not is_remote(name):
            with Path(name).open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as file:  # the batch may take longer than a server leaves a connection open
            with urllib.request.urlopen(name, timeout=TIMEOUT_S) as answer:
                while part := answer.read(1 << 20):
                    file.write(part)
            file.seek(0)
            yield file
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UsageError(f"-i {name}: {_text(error)}") from None


@contextlib.contextmanager
def answers(name: str, folder: str | None) -> Iterator[IO[bytes]]:
    """The output file, -o: open, to be written. One behind http is a file in `folder` (--output-tmp-dir) until its end, and is PUT
    then, in several attempts."""
    if not is_remote(name):
        try:
            file = Path(name).open("wb")  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise UsageError(f"-o {name}: {_text(error)}") from None
        with file:
            yield file
        return
    try:
        held = tempfile.NamedTemporaryFile("wb+", dir=folder, prefix="meshlm-batch-", suffix=".jsonl")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--output-tmp-dir {folder}: {_text(error)}") from None
    with held:
        yield held.file
        held.flush()
        _put(name, Path(held.name))


def _put(url: str, file: Path) -> None:
    for attempt in range(1, UPLOADS + 1):
        try:
            with file.open("rb") as data:
                headers = {"Content-Type": "application/jsonl", "Content-Length": str(file.stat().st_size)}
                asked = urllib.request.Request(url, data, headers, method="PUT")
                with urllib.request.urlopen(asked, timeout=UPLOAD_TIMEOUT_S):
                    return
        except (OSError, ValueError, http.client.HTTPException) as error:
            if attempt == UPLOADS:
                kept = file.with_name(f"{file.name}.kept")
                file.rename(kept)
                file.touch()  # whoever made it removes it
                raise StartError(f"-o {url}: {_text(error)}; the answers are in {kept}") from None
            time.sleep(AGAIN_S)


def _text(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "strerror", None) or error)
