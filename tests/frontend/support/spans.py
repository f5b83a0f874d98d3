"""A collector in its own process, and the spans that it got, for tests."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 20.0


class Collector:
    """grpc and http: its ports."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.grpc, self.http = json.loads(process.stdout.readline())
        self.seen: list[dict[str, Any]] = []
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            self._lines.put(line)

    def root(self, request_id: str) -> dict[str, Any]:
        """Waits for the span of this request; its children came before, or with it."""
        while True:
            for span in self.seen:
                if span["attributes"].get("gen_ai.request.id") == request_id:
                    return span
            self.seen.append(json.loads(self._lines.get(timeout=LIMIT_S)))

    def children(self, root: dict[str, Any]) -> list[dict[str, Any]]:
        while not self._lines.empty():
            self.seen.append(json.loads(self._lines.get()))
        return [span for span in self.seen if span["parent"] == root["id"]]


@contextmanager
def collector() -> Iterator[Collector]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("collector.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Collector(process)
        finally:
            process.kill()
