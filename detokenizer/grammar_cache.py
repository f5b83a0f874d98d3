"""The grammars that were compiled, and those that cannot be: each is compiled once, in a process that may die of it.

Called by grammar_threads.py. What is remembered is what the grammar itself decides: never that a host was busy, nor that a limit of CPU
time was met, which the same grammar may pass the next time.
"""

import threading
from collections.abc import Callable

import msgspec
from msgspec import Struct

from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

CACHED = 128  # grammars, refused ones too
MAX_CACHED_BYTES = 32 << 20  # of their texts

Translate = Callable[[Grammar], tuple[str, str]]
"""The library's text, or what is wrong with the grammar. `Unknown` where neither can be said."""


class Unknown(Exception):
    """The grammar could not be compiled now, and nothing is known of it. RequestError.kind and its text."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class _Compiled(Struct, frozen=True):
    text: str
    error: str
    num_bytes: int


class GrammarCache:
    """Safe to call from several threads."""

    def __init__(self, translate: Translate) -> None:
        self._translate = translate
        self._lock = threading.Lock()
        self._known: dict[Grammar, _Compiled] = {}  # those used last stand last
        self._num_bytes = 0

    def known(self, grammar: Grammar) -> Grammar | None:
        """The same constraint as the library's text, if that takes no time. RequestError names the client's field and what is wrong."""
        if grammar.kind is GrammarKind.FREE:
            return _told(grammar, _Compiled("", "", 0))
        asked = _asked(grammar)
        with self._lock:
            if (found := self._known.pop(asked, None)) is None:
                return None
            self._known[asked] = found
        return _told(grammar, found)

    def compile(self, grammar: Grammar) -> Grammar:
        """The same as `known`, however long it takes."""
        if (known := self.known(grammar)) is not None:
            return known
        asked = _asked(grammar)
        try:
            text, error = self._translate(asked)
        except Unknown as unknown:
            raise refused(grammar, unknown.message, unknown.kind) from None
        found = _Compiled(text, error, len(asked.text) + len(text))
        with self._lock:
            self._num_bytes -= replaced.num_bytes if (replaced := self._known.pop(asked, None)) is not None else 0
            self._known[asked] = found
            self._num_bytes += found.num_bytes
            while len(self._known) > CACHED or (self._num_bytes > MAX_CACHED_BYTES and len(self._known) > 1):
                self._num_bytes -= self._known.pop(next(iter(self._known))).num_bytes
        return _told(grammar, found)


def _asked(grammar: Grammar) -> Grammar:
    begins_after = grammar.begins_after if grammar.opens_with else ""
    return msgspec.structs.replace(grammar, param="", thinking=None, begins_after=begins_after, calls="", tools=())


def _told(grammar: Grammar, found: _Compiled) -> Grammar:
    if found.error:
        raise refused(grammar, found.error, ErrorKind.INVALID)
    kept = {name: getattr(grammar, name) for name in ("thinking", "calls", "tools")}
    begins_after = "" if grammar.opens_with else grammar.begins_after
    return Grammar(GrammarKind.COMPILED, found.text, grammar.param, begins_after=begins_after, **kept)


def refused(grammar: Grammar, message: str, kind: ErrorKind) -> RequestError:
    """With the client's name of it."""
    return RequestError(kind, f"{grammar.param}: {message}", grammar.param.split(".")[0])
