"""Starts a real mesh for a test and ends it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil
from waiting import free_port

from meshlm.supervisor import control
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes import state_file

MESHLM = str(Path(sys.executable).parent / "meshlm")
START_LIMIT_S = 90
SPARES = "--standby-roles"
FEW_SPARES = (SPARES, "detokenizer", "coordinator")  # no supervisor's: its start costs a second of a core for each mesh


class Serving:
    """One `meshlm serve`. `lines` is what it said."""

    def __init__(self, *flags: str, prefix: tuple[str, ...] = (), command: tuple[str, ...] = ("serve",)) -> None:
        self.port = free_port()
        self.run_dir = tempfile.mkdtemp(prefix="mlm")
        self.lines: list[str] = []
        self._news: Queue[str | None] = Queue()
        self.process = subprocess.Popen(
            [
                *prefix,
                MESHLM,
                *command,
                "--host",
                "127.0.0.1",
                *(() if "--port" in flags else ("--port", str(self.port))),
                "--run-dir",
                self.run_dir,
                *flags,
                *(FEW_SPARES if command == ("serve",) and SPARES not in flags else ()),
            ],
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            self._news.put(line)
        self._news.put(None)

    def wait_for(self, text: str, limit_s: float = START_LIMIT_S) -> str:
        """The next line with this text. AssertionError with all that was said when it does not come."""
        try:
            while (line := self._news.get(timeout=limit_s)) is not None:
                if text in line:
                    return line
        except Empty:
            pass
        raise AssertionError(f"{text!r} did not come:\n" + "\n".join(self.lines))

    def forget(self) -> None:
        """`wait_for` finds none of the lines that came before."""
        with contextlib.suppress(Empty):
            while True:
                self._news.get_nowait()

    def status(self) -> dict[str, Any]:
        """What `meshlm status --json` prints, asked without starting that command; test_fake.py holds that they are the same."""
        found: dict[str, Any] = control.request(Path(self.run_dir), {"command": "status"})
        return found

    def pid(self, role: str) -> int:
        return next(int(p["pid"]) for p in self.status()["processes"] if p["role"] == role)

    def end_successor(self) -> None:
        """Of a mesh whose supervisor was killed: whoever followed it, and all the others."""
        with contextlib.suppress(StartError):
            supervisor = psutil.Process(self.pid("supervisor"))
            supervisor.terminate()
            psutil.wait_procs([supervisor], timeout=30)
        outline = state_file.outline(Path(self.run_dir))
        for pid in outline.alive if outline is not None else ():
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        """End in good order; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.end_successor()
            self._reader.join(timeout=5)
            assert self.process.stderr is not None
            self.process.stderr.close()
            shutil.rmtree(self.run_dir, ignore_errors=True)


@contextlib.contextmanager
def serving(*flags: str, says: str = "ready: http", command: tuple[str, ...] = ("serve",)) -> Iterator[Serving]:
    """A mesh that is ready: it says so."""
    server = Serving(*flags, command=command)
    try:
        server.wait_for(says)
        yield server
    finally:
        server.stop()


def meshlm(server: Serving, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A subcommand for this mesh."""
    command = [MESHLM, *arguments, "--run-dir", server.run_dir]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
