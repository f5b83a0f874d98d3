"""Methods of a class of the user's, called in a worker by name."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from meshlm.protocol.operations import CallWorkers, OperationDone, OperationId
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.operations import Extension

NAME = OperationId("n")
CODE = """
class Mine:
    limit = 3
    def scale(self, by, plus=0):
        return {"rank": self.rank, "value": self.model * by + plus}
    def fails(self):
        raise KeyError("no such layer")
    def kind(self):
        return type(self)
    def _own(self):
        return 1
class Broken:
    def __init__(self, worker):
        pass
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mine_f.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_f", raising=False)
    return SimpleNamespace(model=7, device="cpu")


def called(extension: Extension, method: str, *args: object, **kwargs: object) -> OperationDone:
    return extension.call(NAME, CallWorkers(method, msgspec.json.encode({"args": args, "kwargs": kwargs})))


@pytest.mark.parametrize("name", ["mine_f.Mine", "mine_f:Mine"])
def test_what_it_gives(engine: Any, name: str) -> None:
    extension = Extension(name, engine, 2)
    (result,) = called(extension, "scale", 2, plus=1).results
    assert msgspec.json.decode(result) == {"rank": 2, "value": 15}
    (result,) = called(extension, "kind").results
    assert b"mine_f.Mine" in result, "what JSON has not is text"


def test_what_goes_wrong_is_named_and_the_worker_goes_on(engine: Any) -> None:
    extension = Extension("mine_f.Mine", engine, 0)
    assert called(extension, "fails").error == "Mine.fails: KeyError: 'no such layer'"
    assert called(extension, "scale").error.startswith("Mine.scale: TypeError: ")
    for name in ("_own", "__init__", "nothing", "limit", "engine"):
        assert called(extension, name).error == f"method: Mine has no {name!r}"
    for name in ("nowhere.Mine", "mine_f.Nobody", "mine_f.Broken", "Mine"):
        with pytest.raises(ProcessFatal, match=f"--worker-extension-cls {name}: "):
            Extension(name, engine, 0)
    assert "start the server with --worker-extension-cls" in called(Extension("", engine, 0), "scale").error


def test_the_log_says_once_that_changes_are_lost_with_the_worker(engine: Any) -> None:
    with capture_logs() as logs:
        for rank in (0, 1):
            extension = Extension("mine_f.Mine", engine, rank)
            for _ in range(3):
                called(extension, "scale", 2)
    (line,) = logs
    assert line["log_level"] == "warning"
    assert "takes no requests until the weights are updated" in line["note"]
