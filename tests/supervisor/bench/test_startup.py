"""`bench startup` without processes: what a cold start may find, and how starts are summed up."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshlm.supervisor.bench import offline
from meshlm.supervisor.cli import main


def test_a_cold_start_finds_no_kernels_but_the_hubs_files() -> None:
    found = offline.cold_environment("/tmp/x", {"XDG_CACHE_HOME": "/home/me/cache"})
    assert found["HF_HOME"] == "/home/me/cache/huggingface"
    assert {value.startswith("/tmp/x") for name, value in found.items() if name != "HF_HOME"} == {True}
    assert offline.cold_environment("/tmp/x", {"HF_HOME": "/models"})["HF_HOME"] == "/models"


def test_starts_are_cold_then_warm_and_warm_ups_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[dict[str, str]] = []

    def started(settings: dict[str, Any], environment: dict[str, str]) -> float:
        assert settings["device"] == "fake"
        starts.append(environment)
        return float(len(starts))

    monkeypatch.setattr(offline, "started", started)
    counts = "--num-iters-cold 2 --num-iters-warmup 1 --num-iters-warm 3"
    line = f"bench startup --device fake {counts} --output-json {tmp_path / 'found.json'}"
    assert main.run(line.split()) == 0
    assert [bool(one) for one in starts] == [True, True, False, False, False, False]
    assert starts[0]["XDG_CACHE_HOME"] != starts[1]["XDG_CACHE_HOME"]
    assert not any(Path(one["XDG_CACHE_HOME"]).exists() for one in starts[:2])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cold_startup_times"] == [1, 2]
    assert found["warm_startup_times"] == [4, 5, 6]
    assert (found["avg_warm_startup_time"], found["warm_startup_percentiles"]["50"]) == (5, 5)


@pytest.mark.parametrize("words", ["--num-iters-cold 0", "--num-iters-warm 0", "--output-json /dev/null/x"])
def test_bad_input(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "startup", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"meshlm: error: {words.split()[0]}")
