"""A headless Chromium for tests of the dashboard: tests/browser/README.md."""

import json
import subprocess
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-browser" / "bin" / "python"  # made by the Makefile
LIMIT_S = 15.0
NO_LIBRARY = "cannot open shared object file"  # the linker's words


class Browser:
    """One browser with one page. `dark`: what its system prefers."""

    def __init__(self, *, dark: bool = False) -> None:
        command = [str(PYTHON), str(ROOT / "tests" / "browser" / "driver.py"), *(["dark"] if dark else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
        )
        self._answers: Queue[str] = Queue()
        self._said: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._hear, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _hear(self) -> None:
        assert self._process.stderr is not None
        self._said += self._process.stderr

    def _do(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=LIMIT_S)
        except (BrokenPipeError, Empty):
            line = ""
        if not line:
            self._ended()
        return json.loads(line)

    def _ended(self) -> None:
        self._process.kill()
        self._readers[1].join(timeout=5)
        said = "".join(self._said)
        if NO_LIBRARY in said:
            pytest.skip(said.strip().splitlines()[-1])
        raise AssertionError(f"the browser gave no answer:\n{said[-3000:]}")

    def open(self, url: str) -> None:
        assert self._do(open=url), f"{url} was not loaded"

    def run(self, script: str) -> Any:
        """The value of an expression; null is the empty string."""
        return self._do(run=script)

    def until(self, script: str, limit_s: float = LIMIT_S) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + limit_s
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"not true in {limit_s:g} s: {script}; the page says {self.console()}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def size(self, width: int, height: int) -> None:
        self._do(size=[width, height])
        self.until(f"innerWidth === {width}")

    def shot(self, path: Path) -> None:
        assert self._do(shot=str(path))

    def console(self) -> list[str]:
        """What the page has written there since it was last asked, alerts too."""
        found: list[str] = self._do(console=True)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        finally:
            self._process.kill()
            for reader in self._readers:
                reader.join(timeout=5)
            for pipe in (self._process.stdout, self._process.stderr):
                assert pipe is not None
                pipe.close()
