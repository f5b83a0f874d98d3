"""What `meshlm status` prints."""

import re

import pytest

from meshlm.supervisor.cli.status import show
from meshlm.supervisor.control import MeshStatus, ProcessStatus, StandbyStatus

PROCESS = ProcessStatus("detokenizer", 0, 4711, 5, "ready", 61.2, 2, "", 65_000_000)


def printed(status: MeshStatus, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of each row below the title and the headings."""
    show(status)
    return [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()[2:]]


def test_standbys_are_rows_below_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    loading = StandbyStatus("coordinator", 4713, "loading", 0.4)
    waiting = StandbyStatus("detokenizer", 4712, "standby", 59.0, 160_000_000)
    rows = printed(MeshStatus([PROCESS], [waiting, loading], model="m", port=8000), capsys)
    assert [row[:2] for row in rows] == [
        ["detokenizer/0", "ready"],
        ["detokenizer", "standby"],
        ["coordinator", "loading"],
    ]
    assert "4712" in rows[1]
    assert "160 MB" in rows[1]


def test_the_title_says_which_ranks_are_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    show(MeshStatus([PROCESS], model="m", port=1, data_parallel_size=3, dp_roles="prefill:2,decode:1"))
    assert capsys.readouterr().out.splitlines()[0].startswith("m on port 1, 3 ranks (prefill:2,decode:1)")


def test_hosts_are_a_column_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    there = StandbyStatus("worker", 4712, "standby", 59.0, 1, host="gpu-7")
    status = MeshStatus([ProcessStatus("worker", 1, 7, 5, "ready", 1.0, 0, host="gpu-7")], [there], model="m", port=1)
    assert [row[:2] for row in printed(status, capsys)] == [["worker/1", "gpu-7"], ["worker", "gpu-7"]]


def test_names_are_whole_and_the_title_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and pids are copied from here, also from a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    process = ProcessStatus(
        "coordinator", 0, 4711, 5, "ready", 61.2, 2, "waiting for a place", 65_000_000, "a-host-name"
    )
    show(MeshStatus([process], model="m", port=1, data_parallel_size=2, missing="rank 1"))
    out = capsys.readouterr().out
    assert "coordinator/0" in out
    assert "4711" in out
    assert "(not ready: no node has rank 1)" in " ".join(out.split())
