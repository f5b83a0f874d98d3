"""What others chose is shown as text: in the log, in errors, in tables."""

import json

import pytest
import structlog

from meshlm.protocol.config import RunConfig
from meshlm.runtime.process import logs
from meshlm.runtime.process.readable import MAX_SHOWN, readable
from meshlm.supervisor import control
from meshlm.supervisor.cli import status

EVIL = "\x1b]0;owned\x07\x1b[2J\r\n12:00:00 [info] ready\u202e\u2028\x9b31m\x7f"


@pytest.mark.parametrize("text", ["", "plain", "Ünïcode 😀 日本", "[bold]x[/bold]", "back\\slash"])
def test_text_stays_as_it_is(text: str) -> None:
    assert readable(text) == text


def test_nothing_moves_a_cursor_or_ends_a_line() -> None:
    shown = readable(EVIL)
    assert shown.isprintable()
    assert shown.startswith("\\x1b]0;owned\\x07\\x1b[2J\\x0d\\x0a12:00:00")
    assert readable("\ud800") == "\\ud800"


def test_a_long_text_is_cut() -> None:
    shown = readable("x" * 1_000_000)
    assert len(shown) < MAX_SHOWN + 40
    assert shown.endswith("... (1000000 characters)")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_field_of_a_log_line_makes_no_other_line(log_format: str, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure(RunConfig(log_format=log_format))  # type: ignore[arg-type]
    try:
        structlog.get_logger().warning("unknown request field ignored", field=EVIL, long="y" * 100_000)
    finally:
        structlog.reset_defaults()
    (line,) = capfd.readouterr().err.splitlines()
    assert "owned" in line
    assert len(line) < 6000
    assert not any(mark in line for mark in ("\x07", "\r", "\u202e", "]0;owned\x07"))
    if log_format == "json":
        assert json.loads(line)["field"].startswith("\\x1b")
    else:
        assert "\x1b]" not in line
        assert "\x1b[2J" not in line


def test_the_table_of_a_mesh_shows_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status.show(control.MeshStatus([], model=f"[red]{EVIL}", port=8000))
    shown = capsys.readouterr().out
    assert "[red]" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
