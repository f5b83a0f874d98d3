"""Starts a whole mesh of its own (free port, private run directory) for chaos.py and soak.py, asks it for its state, ends it."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, fields
from pathlib import Path

MESHLM = [sys.executable, "-P", "-m", "meshlm.supervisor"]
START_LIMIT_S = 300.0


@dataclass(frozen=True)
class Place:
    """One process as `meshlm status` shows it."""

    role: str
    index: int
    pid: int
    state: str
    restarts: int
    rss_bytes: int

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Mesh:
    """One `meshlm serve`. What it says is kept in `lines`."""

    def __init__(self, flags: list[str]) -> None:
        self.port, self.run_dir = free_port(), Path(tempfile.mkdtemp(prefix="mlm"))
        self.lines: list[str] = []
        self._ready = threading.Event()
        own = ["--host", "127.0.0.1", "--port", str(self.port), "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            [*MESHLM, "serve", *own, *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if "ready: http" in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        """SystemExit with its own words when it does not start."""
        if not self._ready.wait(START_LIMIT_S) or self.process.poll() is not None:
            raise SystemExit("the mesh did not start:\n" + "\n".join(self.lines[-20:]))

    async def places(self) -> list[Place]:
        """All processes but the supervisor; [] when the supervisor does not answer."""
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_unix_connection(str(self.run_dir / "status.sock"), limit=1 << 20)
                writer.write(b'{"command": "status"}\n')
                reply = json.loads(await reader.readline())
                writer.close()
        except (OSError, ValueError, TimeoutError):
            return []
        rows = [Place(*(row[field.name] for field in fields(Place))) for row in reply["processes"]]
        return [row for row in rows if row.role != "supervisor"]

    def stop(self) -> int:
        """End it in good order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join(timeout=5)
            shutil.rmtree(self.run_dir, ignore_errors=True)
