"""`meshlm tune`: how the model is started, and what is said of the tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshlm.supervisor.cli import offline
from meshlm.supervisor.cli.main import run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of models that were started, and whether they were ended."""
    seen: list[dict[str, Any]] = []

    class Model:
        def __init__(self, **settings: Any) -> None:
            seen.append(settings)

        def shutdown(self) -> None:
            seen[-1]["ended"] = True

    monkeypatch.setattr(offline, "LLM", Model)
    return seen


def test_a_model_is_started_tunes_and_ends(started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "some/model", "--max-model-len", "100"]) == 0
    usual = {"tune": "full", "enforce_eager": True, "ended": True}
    assert started == [{**usual, "model": "some/model", "max_model_len": 100}]
    assert "user's cache" in capsys.readouterr().out


def test_tables_that_can_be_committed(
    started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["tune", "some/model", "--tuning-dir", "mine", "--tune", "quick"]) == 0
    assert started[0]["tuning_dir"] == str(tmp_path / "mine")  # workers run elsewhere
    assert started[0]["tune"] == "quick"
    assert "no table" in capsys.readouterr().out
    path = tmp_path / "mine" / "gemm" / "tables" / "gpu.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"products": [{"rows": []}, {"rows": [[1, 2, [3]]]}]}))
    assert run(["tune", "some/model", "--tuning-dir", str(tmp_path / "mine")]) == 0
    assert f"{path}: 2 sizes, 1 of them faster than the plain way" in capsys.readouterr().out
