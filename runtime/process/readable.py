"""Text that others chose, so that it can be shown: no character of it moves a cursor, and none of it is long. Pure.

`about` and `requests` say in a line of the log which requests it is about: the ids that clients know, a few where there are many.
"""

from collections.abc import Sequence

from msgspec import Struct

MAX_SHOWN = 500

# C0 and C1 controls (escape sequences, line ends), and those that turn the direction of text or end a line.
_HIDDEN = (*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def readable(text: str, most: int = MAX_SHOWN) -> str:
    """Control characters escaped as Python writes them, and no more than the beginning."""
    shown = text[:most].translate(_ESCAPED).encode(errors="backslashreplace").decode()  # half a surrogate pair too
    return f"{shown}... ({len(text)} characters)" if len(text) > most else shown


MAX_IDS = 8


def about(message: Struct) -> dict[str, str]:
    """The fields of a line about this message: its type, and its requests where it names any."""
    named = getattr(message, "work", message)  # of Admit and Assign
    one: str | None = getattr(named, "request_id", None)
    ids: Sequence[str] = (one,) if one is not None else getattr(message, "request_ids", ())
    return {"message": type(message).__name__, **requests(ids)}


def requests(ids: Sequence[str]) -> dict[str, str]:
    """The field of a line about these requests. One string: what clients have chosen moves no cursor (logs.py)."""
    if not ids:
        return {}
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return {"requests": ", ".join(ids[:MAX_IDS]) + more}
