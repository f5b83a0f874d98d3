"""The last events of a process are there when it is gone, however it went."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.config import RunConfig
from meshlm.protocol.config.log_levels import level_of, parse
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process import black_box, logs
from meshlm.runtime.process.black_box import BEFORE, SIZE, BlackBox

WORKER = Identity(Role.WORKER, 1)


def test_events_and_the_last_beat_come_back(tmp_path: Path) -> None:
    path = black_box.path_of(tmp_path, WORKER)
    box = BlackBox(path, 7)
    box.write({"at": 1.0, "event": "a\nb", "path": tmp_path})
    box.beat(2.0, 5, "a longer phase")
    box.beat(3.0, 6, "idle")
    found = black_box.read_file(path)
    assert (found.incarnation, found.pid) == (7, os.getpid())
    assert found.beat == {"at": 3.0, "step": 6, "phase": "idle"}
    assert found.events == [{"at": 1.0, "event": "a\nb", "path": str(tmp_path)}]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_next_incarnation_keeps_the_file_of_the_last_one(tmp_path: Path) -> None:
    path = black_box.path_of(tmp_path, WORKER)
    for incarnation in (1, 2, 3):
        BlackBox(path, incarnation).write({"event": f"of {incarnation}"})
    assert black_box.read_file(path).events == [{"event": "of 3"}]
    assert black_box.read_file(path.with_name(path.name + BEFORE)).events == [{"event": "of 2"}]


@given(st.lists(st.integers(0, 40_000), max_size=60))
def test_a_full_ring_keeps_the_newest_whole_lines(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    path = tmp_path_factory.mktemp("ring") / "worker-0.events"
    box = BlackBox(path, 1)
    written = [{"event": "x" * length, "n": number} for number, length in enumerate(lengths)]
    for event in written:
        box.write(event)
    found = black_box.read_file(path)
    assert found.events == written[len(written) - len(found.events) :]
    assert bool(found.events) == bool(written)
    assert found.num_missed == max(0, found.position - SIZE)


def test_a_line_that_is_too_long_is_named(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "a.events", 1)
    box.write({"event": "y" * SIZE, "at": 1.0, "level": "error"})
    assert black_box.read_file(tmp_path / "a.events").events == [{"event": "a long line", "at": 1.0, "level": "error"}]


def test_reading_goes_on_where_it_was(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "a.events", 1)
    box.write({"event": "one"})
    file = os.open(tmp_path / "a.events", os.O_RDONLY)
    first = black_box.read(file)
    box.write({"event": "two"})
    assert black_box.read(file, first.position).events == [{"event": "two"}]
    os.close(file)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.events").write_bytes(b"x" * (1 << 20))
    with pytest.raises(ValueError):
        black_box.read_file(tmp_path / "a.events")


def test_what_was_logged_survives_kill_9(tmp_path: Path) -> None:
    program = (
        "import os, signal, structlog; from pathlib import Path; from meshlm.protocol.config import RunConfig;"
        "from meshlm.protocol.wire.ids import Identity, Role; from meshlm.runtime.process import logs;"
        "me = Identity(Role.WORKER, 1); logs.configure(RunConfig(), identity=me);"
        f"logs.keep(Path({str(tmp_path)!r}), me, 5); log = structlog.get_logger().bind(process=str(me));"
        "log.debug('not this'); logs.set_level('debug'); log.debug('this', rows=3); log.info('and this');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    events = black_box.read_file(black_box.path_of(tmp_path, WORKER)).events
    assert [event["event"] for event in events] == ["process began", "this", "and this"]
    assert events[1]["rows"] == 3
    assert events[1]["process"] == "worker/1"


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"worker/1": "info", "frontend/0": "info"}),
        ("warning,worker=debug", {"worker/1": "debug", "frontend/0": "warning"}),
        ("worker/1=error,worker=debug", {"worker/1": "error", "worker/0": "debug", "frontend/0": "info"}),
        ("INFO, worker=DEBUG", {"worker/1": "debug"}),
    ],
)
def test_levels(text: str, levels: dict[str, str]) -> None:
    assert {name: level_of(text, Identity.parse(name)) for name in levels} == levels


@pytest.mark.parametrize(
    "text", ["", "loud", "info,error", "cat=info", "worker/x=info", "worker=", "worker=info,worker=debug"]
)
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"level|process|twice"):
        parse(text)


def test_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (logs._in_colour("always"), logs._in_colour("never"), logs._in_colour("auto")) == (True, False, False)
    assert RunConfig().log_color == "auto"
