"""`meshlm logs` and `meshlm status --why` read what processes left in the run directory; `meshlm set` changes settings."""

from pathlib import Path

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.changing import CHANGING, changed
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.black_box import BlackBox, path_of
from meshlm.supervisor.cli import main, status
from meshlm.supervisor.cli.status import _Reader
from meshlm.supervisor.settings import changes


def box(run_dir: Path, name: str, incarnation: int = 1) -> BlackBox:
    return BlackBox(path_of(run_dir, Identity.parse(name)), incarnation)


class Asked:
    """What the supervisor is asked to change."""

    def __init__(self) -> None:
        self.values: list[dict[str, str | int | float]] = []

    def __call__(self, values: dict[str, str | int | float]) -> str:
        self.values.append(values)
        return ""


def names(found: list[status.Event]) -> list[str]:
    return [str(event["event"]) for event in found]


def test_lines_of_all_processes_in_order_of_time(tmp_path: Path) -> None:
    worker, frontend = box(tmp_path, "worker/0"), box(tmp_path, "frontend/0")
    worker.write({"at": 1.0, "event": "first", "level": "info"})
    frontend.write({"at": 2.0, "event": "second", "level": "warning"})
    worker.write({"at": 3.0, "event": "third", "level": "debug"})
    everything = _Reader(tmp_path, "", "info")
    assert names(everything.new()) == ["first", "second"]
    assert names(_Reader(tmp_path, "worker", "debug").new()) == ["first", "third"]
    assert names(_Reader(tmp_path, "worker/1", "debug").new()) == []
    worker.write({"at": 4.0, "event": "fourth", "level": "error"})
    assert names(everything.new()) == ["fourth"]


def test_following_goes_on_with_the_next_incarnation(tmp_path: Path) -> None:
    first = box(tmp_path, "worker/0")
    reader = _Reader(tmp_path, "", "debug")
    assert reader.new() == []
    first.write({"at": 1.0, "event": "last word"})
    box(tmp_path, "worker/0", 2).write({"at": 2.0, "event": "first word"})
    assert names(reader.new()) == ["last word", "first word"]


def test_what_was_overwritten_is_said(tmp_path: Path) -> None:
    one = box(tmp_path, "worker/0")
    one.write({"at": 1.0, "event": "seen", "level": "info"})
    reader = _Reader(tmp_path, "", "info")
    reader.new()
    for number in range(400):
        one.write({"at": 2.0, "event": "x" * 1000, "n": number, "level": "info"})
    found = reader.new()
    assert "were overwritten" in str(found[0]["event"])
    assert found[-1]["n"] == 399


def test_why_shows_the_dead(tmp_path: Path) -> None:
    dead = box(tmp_path, "worker/0", 1)
    dead.write({"at": 5.0, "event": "out of \x1b[2Jmemory", "level": "error", "process": "worker/0"})
    dead.beat(6.0, 41, "stepping")
    box(tmp_path, "worker/0", 2)
    (death,) = status.deaths(tmp_path, is_over=False)
    assert (death.process, death.ended_at) == ("worker/0", 6.0)
    title, doing, line = status.show_death(death, "killed by SIGKILL")
    assert "worker/0, pid" in title
    assert "killed by SIGKILL" in title
    assert "stepping, step 41" in doing
    assert "out of" in line
    assert "\x1b" not in line
    assert len(status.deaths(tmp_path, is_over=True)) == 2


def test_a_mesh_that_is_gone_can_still_be_asked_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    box(run_dir, "scheduler/0").write({"at": 5.0, "event": "assertion", "level": "error"})
    assert main.run(["status", "--why", "--run-dir", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "no mesh runs in" in said
    assert "scheduler/0" in said
    assert "assertion" in said


@pytest.mark.parametrize(
    "words", [["logs", "cat"], ["logs", "--lines", "-1"], ["set", "port", "5"], ["set", "log-level"]]
)
def test_usage(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"port": 5}, "port: it cannot change while the mesh runs"),
        ({"max_waiting": "many"}, "max-waiting: "),
        ({"max_concurrent_requests": 0}, "max-concurrent-requests: "),
        ({"log_level": "loud"}, "log-level: 'loud' is no level"),
        ({"log_requests_per_s": "-1"}, "log-requests-per-s: "),
    ],
)
def test_settings_that_are_refused(values: dict[str, object], says: str) -> None:
    config = MeshConfig()
    asked = Asked()
    reply = changes.answer({"values": values}, config, asked)
    assert str(reply["error"]).startswith(says)
    assert not asked.values


def test_settings_that_change() -> None:
    config = changed(MeshConfig(), {"max_waiting": "7", "log_level": "info,worker=debug"})
    assert (config.scheduler.max_waiting, config.run.log_level) == (7, "info,worker=debug")
    asked = Asked()
    reply = changes.answer({"values": {"max_waiting": "7"}}, MeshConfig(), asked)
    assert asked.values == [{"max_waiting": 7}]
    assert reply["settings"]["max_waiting"] == 7
    assert set(changes.answer({}, MeshConfig(), lambda found: "never")["settings"]) == set(CHANGING)
