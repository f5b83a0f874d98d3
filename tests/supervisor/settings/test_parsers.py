"""Parsers that are not there end the start with one line."""

from pathlib import Path

import pytest

from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tool_call_parser": "nobody"}, "--tool-call-parser nobody: there are .*deepseek_v3"),
        ({"reasoning_parser": "nobody"}, "--reasoning-parser nobody: there are .*deepseek_r1"),
        ({"tool_parser_plugin": "missing.py"}, "--tool-parser-plugin missing.py: FileNotFoundError"),
        ({"reasoning_parser_plugin": "missing"}, "--reasoning-parser-plugin missing: ValueError: it is no Python file"),
    ],
)
def test_what_is_not_there_is_refused(smollm2: Path, more: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=f"^{text}"):
        resolve.resolve(flags.build({"model": str(smollm2), "device": "fake", **more}, None))
