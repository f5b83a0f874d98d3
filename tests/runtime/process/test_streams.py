"""The standard streams: there where they were closed, and JSON line by line where that is wanted."""

import io
import json
import subprocess
import sys

import pytest

from meshlm.runtime.process.streams import JsonLines, as_json

SCRIPT = """
import os, sys
from meshlm.runtime.process.streams import open_closed
open_closed()
assert os.open(os.devnull, os.O_RDONLY) > 2
for stream in (sys.stdin, sys.stdout, sys.stderr):
    stream.isatty()
print("said", file=sys.stderr, flush=True)
print("said", flush=True)
assert sys.stdin.read() == ""
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_there(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -P -c "$1" {closed}', sys.executable, SCRIPT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "" if "2>" in closed else "said\n")


def test_text_becomes_a_json_object_a_line() -> None:
    out = io.StringIO()
    lines = JsonLines(out, "worker/0")
    for text in ("a warn", "ing\n\nTraceback:\n", '{"event": "own"}\n', "{not json}\n[1]\n", "begun"):
        lines.write(text)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in found] == ["a warning", "Traceback:", "own", "{not json}", "[1]"]
    assert found[0].keys() == {"event", "level", "process", "timestamp"}


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert "\x1b" not in as_json("\x1b[2J", "worker/0")
