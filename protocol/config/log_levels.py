"""From which level on a process logs: `info`, or `info,worker=debug,frontend/1=error`, where the most particular word counts."""

from meshlm.protocol.wire.ids import Identity, Role

LEVELS = ("debug", "info", "warning", "error")
_ROLES = tuple(role.value for role in Role)


def parse(text: str) -> dict[str, str]:
    """Levels by process ("worker/1"), role, and "" for all others. ValueError with one line."""
    found: dict[str, str] = {}
    for word in text.split(","):
        whose, _, level = word.strip().rpartition("=")
        if level.lower() not in LEVELS:
            raise ValueError(f"{level!r} is no level; they are {', '.join(LEVELS)}")
        if whose:
            role, slash, index = whose.partition("/")
            if role not in _ROLES or (slash and not (index.isascii() and index.isdecimal())):
                raise ValueError(f"{whose!r} is no process; they are {', '.join(_ROLES)}, and worker/0 and the like")
        if whose in found:
            raise ValueError(f"{whose or 'a level for all'} stands there twice")
        found[whose] = level.lower()
    return found


def level_of(text: str, identity: Identity | None) -> str:
    """The level of this process; of None, of what is no process of a mesh."""
    levels = parse(text)
    names = (str(identity), identity.role.value) if identity is not None else ()
    return next((levels[name] for name in (*names, "") if name in levels), "info")
