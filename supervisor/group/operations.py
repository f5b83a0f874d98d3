"""What an operator asks of a running mesh over the control socket: restart, drain, stop. The decisions are rolling.py's.

Owned by io.py. Commands answer at once; the command line asks for the news until there is an outcome. The processes of other nodes
are replaced by their own supervisors, when the head's asks for it: still one process after the other in the whole mesh.
"""

from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import Any

from msgspec import Struct

from meshlm.protocol.edges import control as edge
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.group import rolling

Answer = dict[str, Any]
Part = tuple[Identity | None, tuple[Identity, ...]]  # the supervisor (None: this one) and its processes
MAX_LINES = 10_000


class Operations:
    """`do` hands an event to the group, `refuse` tells all frontends, `stop` ends the mesh, `elsewhere` are the processes of other
    nodes with their supervisors, `send` says whether such a one could be reached."""

    def __init__(
        self,
        restarts: rolling.Rolling,
        do: Callable[[rolling.Event], None],
        refuse: Callable[[bool], None],
        stop: Callable[[], None],
        elsewhere: Callable[[], dict[Identity, Identity]],
        send: Callable[[Identity, Struct], bool],
    ) -> None:
        self._restarts, self._group = restarts, restarts.group
        self._do, self._refuse, self._stop = do, refuse, stop
        self._elsewhere, self._send = elsewhere, send
        self.refusing = False
        self.num_open: dict[Identity, int] = {}  # frontend -> open requests, while draining
        self._lines: list[str] = []
        self._outcome: str | None = ""
        self._parts: deque[Part] = deque()  # of the restart that is under way
        self._asked_by: Identity | None = None  # the head, whose restart has come to this node

    COMMANDS = ("restart", "restart-news", "drain", "drain-state", "stop")

    def answer(self, request: dict[str, object]) -> Answer:
        """The answer that `meshlm restart` and `meshlm drain` read."""
        match request:
            case {"command": "restart", "what": str(what)}:
                return self._restart(what)
            case {"command": "restart-news", "from": int(first)}:
                return {"lines": self._lines[max(0, first) :], "outcome": self._outcome}
            case {"command": "drain"} if not self._frontends():
                return {"error": "no frontend is on this node; give the order on the head, for the whole mesh"}
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
        if busy := self._busy():
            return {"error": busy}
        elsewhere = self._elsewhere()
        try:
            identities = rolling.chosen(what, (*self._group.processes, *elsewhere))
        except ValueError as error:
            return {"error": str(error)}
        self._lines, self._outcome = [], None
        self._parts.extend((node, tuple(part)) for node, part in groupby(identities, elsewhere.get))
        self._next_part()
        return {"processes": [str(identity) for identity in identities]}

    def _busy(self) -> str:
        """Why no restart can begin."""
        if not self._group.was_ready:
            return "the mesh is still starting"
        if self._restarts.restarting or self._parts:
            return "a restart is under way"
        return "the mesh is being scaled" if self._group.changing else ""

    def _next_part(self) -> None:
        node, identities = self._parts[0]
        if node is None:
            self._do(rolling.Restart(identities))
        elif not self._send(node, edge.RestartProcesses(identities)):
            self.over(f"{', '.join(map(str, identities))}: the node of {node} cannot be reached")

    # --- between the head and the other nodes ---

    def restart_for(self, head: Identity, asked: edge.RestartProcesses) -> None:
        """The head wants these of this node's processes replaced."""
        missing = [identity for identity in asked.identities if identity not in self._group.processes]
        failure = self._busy() or ("there is no " + ", ".join(map(str, missing)) if missing else "")
        if failure:
            self._send(head, edge.RestartNews(over=True, failure=failure))
            return
        self._asked_by, self._lines, self._outcome = head, [], None
        self._parts.append((None, asked.identities))
        self._next_part()

    def restart_news(self, node: Identity, news: edge.RestartNews) -> None:
        """News of a restart from a node that was asked; those of another node are dropped."""
        if self._parts and self._parts[0][0] == node:
            for line in news.lines:
                self.say(line)
            if news.over:
                self.over(news.failure)

    def node_lost(self, node: Identity) -> None:
        """A lost node's part of a restart ends here; the node goes on with what it has begun."""
        if self._parts and self._parts[0][0] == node:
            self.over(f"{node} was lost while its processes were replaced")

    def _drained(self) -> Answer:
        """`num_open` is null until all frontends have said so."""
        frontends = self._frontends()
        known = [self.num_open[identity] for identity in frontends if identity in self.num_open]
        return {"refusing": self.refusing, "num_open": sum(known) if len(known) == len(frontends) else None}

    def _frontends(self) -> list[Identity]:
        return [identity for identity in self._group.processes if identity.role is Role.FRONTEND]

    # --- what the group says ---

    def say(self, text: str) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(text)
        if self._asked_by is not None:
            self._send(self._asked_by, edge.RestartNews((text,)))

    def over(self, failure: str) -> None:
        """A part of the restart is; after a failure all of it is."""
        if self._parts:
            self._parts.popleft()
        if failure:
            self._parts.clear()
        if self._parts:
            self._next_part()
            return
        self._outcome = failure
        head, self._asked_by = self._asked_by, None
        if head is not None:
            self._send(head, edge.RestartNews(over=True, failure=failure))
