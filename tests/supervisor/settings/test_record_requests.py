"""A folder in which no frontend could write recordings ends the start with one line."""

from pathlib import Path

import pytest

from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


def test_a_folder_that_cannot_be_written(smollm2: Path, tmp_path: Path) -> None:
    """One that is not there is made in the folder above it."""
    (tmp_path / "file").touch()

    def resolved(folder: Path) -> str:
        asked: dict[str, object] = {"model": str(smollm2), "device": "fake", "record_requests": str(folder)}
        return resolve.resolve(flags.build(asked, None)).server.record_requests

    for wrong in (tmp_path / "nowhere" / "new", tmp_path / "file"):
        with pytest.raises(UsageError, match=f"^--record-requests {wrong}: no file can be written there$"):
            resolved(wrong)
    for right in (tmp_path, tmp_path / "new"):
        assert resolved(right) == str(right)
