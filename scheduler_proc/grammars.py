"""The grammars of this rank's requests, and which of them its workers have compiled. Pure; owned by core.py.

A request waits for its grammar before it gets a row: workers compile beside their steps, so nobody else waits for it. Requests with the
same grammar share it. What workers have compiled is forgotten with its last request, and with the workers.
"""

from collections import deque

from meshlm.protocol.edges.step import GrammarReady, PrepareGrammar
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.events import Send
from meshlm.scheduler_proc.request import Request, RequestGrammar

MAX_ASKED = 16  # grammars that a worker is asked for at once: steps go over the same link


class Grammars:
    """`workers` are all of the rank's, each of which compiles."""

    def __init__(self, workers: list[Identity]) -> None:
        self._workers = workers
        self._by_text: dict[str, RequestGrammar] = {}
        self._by_number: dict[int, RequestGrammar] = {}
        self._unsaid: deque[RequestGrammar] = deque()
        self._unanswered: set[tuple[int, Identity]] = set()
        self._last = 0

    def begin(self) -> None:
        """The workers are new, or begin anew: all is asked again."""
        self._unsaid = deque(self._by_text.values())
        self._unanswered.clear()
        for grammar in self._unsaid:
            grammar.missing = set(self._workers)

    def add(self, request: Request) -> None:
        """A request came; it may not have a grammar."""
        asked = request.work.sampling.grammar
        if asked is None:
            return
        grammar = self._by_text.get(asked.text)
        if grammar is None:
            self._last += 1
            grammar = RequestGrammar(self._last, asked.text, set(self._workers))
            self._by_text[asked.text] = self._by_number[self._last] = grammar
            self._unsaid.append(grammar)
        grammar.requests.add(request)
        request.grammar = grammar

    def remove(self, request: Request) -> None:
        """A request ended."""
        if (grammar := request.grammar) is not None:
            grammar.requests.discard(request)
            if not grammar.requests:
                del self._by_text[grammar.text], self._by_number[grammar.number]

    def asks(self, session: int) -> list[Send]:
        """What is to be said to the workers now, which can be reached."""
        sends = []
        while self._unsaid and len(self._unanswered) < MAX_ASKED * len(self._workers):
            grammar = self._unsaid.popleft()
            if grammar.requests:
                self._unanswered |= {(grammar.number, worker) for worker in self._workers}
                ask = PrepareGrammar(session, grammar.number, grammar.text)
                sends += [Send(worker, ask) for worker in self._workers]
        return sends

    def ready(self, worker: Identity, ready: GrammarReady) -> tuple[Request, ...]:
        """A worker answered. The requests that end, where it cannot have their grammar."""
        self._unanswered.discard((ready.number, worker))
        grammar = self._by_number.get(ready.number)
        if grammar is None:
            return ()
        grammar.missing.discard(worker)
        return tuple(grammar.requests) if ready.failed is not None else ()
