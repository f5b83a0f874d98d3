"""Files of results: whether they can be written is known before anything is measured."""

import json
from pathlib import Path
from typing import Any

from meshlm.supervisor.errors import StartError, UsageError


def claim(flag: str, file: Path) -> None:
    """The file can be written, and its folder is there. UsageError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: {file}: {getattr(error, 'strerror', None) or error}") from None


def write(file: Path, result: dict[str, Any], *, append: bool = False) -> None:
    """Writes the result as JSON; append: on a line of its own behind what there is. StartError when it cannot."""
    text = json.dumps(result, indent=None if append else 1)
    try:
        if append and file.stat().st_size:
            with file.open("a", encoding="utf-8") as out:
                out.write("\n" + text)
        else:
            file.write_text(text, "utf-8")
    except OSError as error:
        raise StartError(f"{file}: {error.strerror}") from None
