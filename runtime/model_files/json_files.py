"""Small text files of a model: read whole, and one line that names the file where that fails. Called by the other readers here."""

import json
import math
from typing import Any

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.object_store import AnyPath


def read_text(path: AnyPath) -> str:
    """UTF-8. ModelFilesError."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: {error}") from None


def read_json(path: AnyPath) -> dict[str, Any]:
    """An object whose numbers are finite. ModelFilesError."""
    return parse_object(read_text(path), str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object whose numbers are finite. ModelFilesError says where the text comes from."""
    try:
        value = json.loads(text)
        odd = _not_finite(value)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{where}: {error}") from None
    if odd:
        raise ModelFilesError(f"{where}: {odd}; it must be a finite number")
    if not isinstance(value, dict):
        raise ModelFilesError(f"{where}: not a JSON object")
    return value


def _not_finite(value: Any, name: str = "a value") -> str:
    """JSON has neither NaN nor infinity, but Python writes and reads them. "" where there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} is {value}"
    inner = (
        value.items() if isinstance(value, dict) else ((name, one) for one in value) if isinstance(value, list) else ()
    )
    return next((odd for key, one in inner if (odd := _not_finite(one, key))), "")
