"""Text that others chose, so that it can be shown: no character of it moves a cursor, and none of it is long. Pure."""

MAX_SHOWN = 500

# C0 and C1 controls (escape sequences, line ends), and those that turn the direction of text or end a line.
_HIDDEN = (*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def readable(text: str, most: int = MAX_SHOWN) -> str:
    """Control characters escaped as Python writes them, and no more than the beginning."""
    shown = text[:most].translate(_ESCAPED).encode(errors="backslashreplace").decode()  # half a surrogate pair too
    return f"{shown}... ({len(text)} characters)" if len(text) > most else shown
