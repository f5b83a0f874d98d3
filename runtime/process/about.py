"""What a line of the log says of the requests that it is about: the ids that clients know, a few of them where there are many."""

from collections.abc import Sequence

from msgspec import Struct

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
