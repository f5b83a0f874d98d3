"""Frontends that wait for figures as of now, because their /metrics is read. Pure; owned by core.py.

Each rank is asked for a Load, by the way of the requests and their aborts, so its answer knows of all that went before. A frontend
has one question at a time: a newer one takes the place of the older.
"""

from collections.abc import Iterable

from meshlm.protocol.wire.ids import Identity


class Questions:
    """See the module docstring. What `ask`, `answered` and `lost` return has waited for all ranks: it is to be told now."""

    def __init__(self) -> None:
        self.number = 0  # of the newest question
        self._waiting: dict[
            Identity, tuple[int, set[Identity]]
        ] = {}  # by frontend: its number, ranks that are silent yet

    def ask(self, frontend: Identity, ranks: Iterable[Identity]) -> list[Identity]:
        self.number += 1
        self._waiting[frontend] = (self.number, set(ranks))
        return self._over()

    def answered(self, rank: Identity, number: int) -> list[Identity]:
        """A rank's Load came; `number` is the newest question that it knows."""
        if not self._waiting:
            return []
        for asked, silent in self._waiting.values():
            if asked <= number:
                silent.discard(rank)
        return self._over()

    def lost(self, identity: Identity) -> list[Identity]:
        """A rank or a frontend is gone."""
        self._waiting.pop(identity, None)
        for _, silent in self._waiting.values():
            silent.discard(identity)
        return self._over()

    def _over(self) -> list[Identity]:
        over = [frontend for frontend, (_, silent) in self._waiting.items() if not silent]
        for frontend in over:
            del self._waiting[frontend]
        return over
