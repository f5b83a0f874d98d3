"""What an operator asks of a running mesh over the control socket: restart, drain, stop. The decisions are rolling.py's.

Owned by io.py. Commands answer at once; the command line asks for the news until there is an outcome.
"""

from collections.abc import Callable
from typing import Any

from meshlm.protocol.ids import Identity, Role
from meshlm.supervisor import rolling

Answer = dict[str, Any]
MAX_LINES = 10_000


class Operations:
    """`do` hands an event to the group, `refuse` tells all frontends, `stop` ends the mesh."""

    def __init__(
        self,
        group: rolling.Rolling,
        do: Callable[[rolling.Event], None],
        refuse: Callable[[bool], None],
        stop: Callable[[], None],
    ) -> None:
        self._group, self._do, self._refuse, self._stop = group, do, refuse, stop
        self.refusing = False
        self.num_open: dict[Identity, int] = {}  # frontend -> open requests, while draining
        self._lines: list[str] = []
        self._outcome: str | None = ""

    COMMANDS = ("restart", "restart-news", "drain", "drain-state", "stop")

    def answer(self, request: dict[str, object]) -> Answer:
        """What `meshlm restart` and `meshlm drain` read."""
        match request:
            case {"command": "restart", "what": str(what)}:
                return self._restart(what)
            case {"command": "restart-news", "from": int(first)}:
                return {"lines": self._lines[max(0, first) :], "outcome": self._outcome}
            case {"command": "drain", "on": bool(on)}:
                self.refusing, self.num_open = on, {}
                self._refuse(on)
                return self._drained()
            case {"command": "drain-state"}:
                return self._drained()
            case {"command": "stop"}:
                self._stop()
                return {}
        return {"error": f"{request.get('command')}: unknown, or without what it needs"}

    def _restart(self, what: str) -> Answer:
        if not self._group.was_ready:
            return {"error": "the mesh is still starting"}
        if self._group.restarting:
            return {"error": "a restart is under way"}
        if self._group.changing:
            return {"error": "the mesh is being scaled"}
        try:
            identities = rolling.chosen(what, self._group.processes)
        except ValueError as error:
            return {"error": str(error)}
        self._lines, self._outcome = [], None
        self._do(rolling.Restart(identities))
        return {"processes": [str(identity) for identity in identities]}

    def _drained(self) -> Answer:
        """`num_open` is null until all frontends have said so."""
        frontends = [identity for identity in self._group.processes if identity.role is Role.FRONTEND]
        known = [self.num_open[identity] for identity in frontends if identity in self.num_open]
        return {"refusing": self.refusing, "num_open": sum(known) if len(known) == len(frontends) else None}

    # --- what the group says ---

    def say(self, text: str) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(text)

    def over(self, failure: str) -> None:
        self._outcome = failure
