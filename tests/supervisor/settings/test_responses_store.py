"""A file for responses that no frontend could write ends the start with one line."""

from pathlib import Path

import pytest

from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


def test_a_file_that_cannot_be_written(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`off` is no file: a folder of this name hinders nothing."""
    (tmp_path / "off").mkdir()
    (tmp_path / "of").mkdir()
    monkeypatch.chdir(tmp_path)

    def resolved(file: str) -> str:
        asked: dict[str, object] = {"model": str(smollm2), "device": "fake", "responses_store": file}
        return resolve.resolve(flags.build(asked, None)).server.responses_store

    for wrong in (tmp_path / "nowhere" / "file", tmp_path, "of"):
        with pytest.raises(UsageError, match=f"^--responses-store {wrong}: this file cannot be written$"):
            resolved(str(wrong))
    for right in ("", "off", str(tmp_path / "file")):
        assert resolved(right) == right
