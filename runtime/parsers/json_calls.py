"""Calls that are written in JSON: one, a list, several one after the other; and arguments in JSON behind a name. Pure."""

import re
from collections.abc import Callable

from msgspec import Struct

from meshlm.runtime.parsers.scan import Sink, Steps
from meshlm.runtime.parsers.streamed_calls import Answer, Body

_BEFORE_FIRST, _BETWEEN = re.compile(r"[\s\[]*"), re.compile(r"[\s\[,;]*")
_SCALAR = re.compile(r'[^\s,{}\[\]":]*')


class Keys(Struct, frozen=True):
    """What a form calls the parts of a call; other keys say nothing that a client is told, such as "type": "function"."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    known_only: bool = False  # other JSON may look the same, so a call is one of a tool that the request names


DEFAULT = Keys()


def calls(keys: Keys = DEFAULT, *, before: str = "", in_list: bool = False) -> Body:
    """A body of calls, one after the other and in lists, with blanks, "," or ";" between. `before` is a tag that stands before them."""

    def body(answer: Answer) -> Steps[None]:
        if before:
            yield from answer.blanks()
            if not (yield from answer.take(before)):
                return
        found, lists = False, in_list
        while True:
            answer.hold()
            between = yield from answer.run(_BETWEEN if found else _BEFORE_FIRST)
            if not (yield from _call(answer, keys)):
                answer.back()
                break
            answer.drop()
            found, lists = True, lists or "[" in between
        if found and lists:
            yield from answer.take_behind_blanks("]")

    return body


def _call(answer: Answer, keys: Keys) -> Steps[bool]:
    """The call that begins here; False: there is none, and nothing was given out."""
    if not (yield from answer.take("{")):
        return False
    reading = _Reading(answer, keys)
    while True:
        yield from answer.blanks()
        if (yield from answer.take("}")):
            break
        if not (yield from reading.pair()):
            return reading.begun
        yield from answer.blanks()
        if not (yield from answer.take(",")):
            if (yield from answer.take("}")):
                break
            return reading.begun
    reading.begin()
    answer.end()
    return reading.begun


class _Reading:
    """The pairs of one call. It begins when both its name and its arguments are there, whichever comes first."""

    def __init__(self, answer: Answer, keys: Keys) -> None:
        self._answer, self._keys = answer, keys
        self._name: str | None = None
        self._held: list[str] | None = None  # arguments that stand before the name
        self.begun = False

    def pair(self) -> Steps[bool]:
        """One key and its value; False where there is none, or the value is no part of a call."""
        answer, keys = self._answer, self._keys
        key = yield from answer.json_string()
        if key is None:
            return False
        yield from answer.blanks()
        if not (yield from answer.take(":")):
            return False
        yield from answer.blanks()
        if key in keys.names and self._name is None:
            self._name = yield from answer.json_string()
            known = self._name in answer.tools or not keys.known_only
            return bool(self._name) and known
        if key in keys.arguments and not self.begun and self._held is None:
            return (yield from self._arguments())
        return (yield from self._skip())

    def _arguments(self) -> Steps[bool]:
        """An object, or one as text."""
        answer = self._answer
        as_text = yield from answer.take('"')
        if as_text:
            yield from answer.blanks()
        if not (yield from answer.ahead("{")):
            return False
        self._held = list[str]()
        sink: Sink = self._held.append
        if self._name is not None:
            self.begin()
            sink = answer.add
        if as_text:
            yield from answer.json_text(sink)
            return True
        return (yield from answer.json.value(answer, sink))

    def begin(self) -> None:
        """Begin the call, if there is one."""
        if self._name is not None and self._held is not None and not self.begun:
            self._answer.begin(self._name)
            self._answer.add("".join(self._held))
            self.begun = True

    def _skip(self) -> Steps[bool]:
        answer, sign = self._answer, (yield from self._answer.next())
        if sign == '"':
            answer.at += 1
            yield from answer.json_text(_ignore)
            return True
        if sign and sign in "{[":
            return (yield from answer.json.value(answer, _ignore))
        return bool((yield from answer.run(_SCALAR)))


def _ignore(text: str) -> None:
    """Takes text that nobody needs."""


def named(head: Callable[[Answer], Steps[tuple[str, str]]], *, behind: str = "") -> Body:
    """A body whose `head` says a call's name and id ("" if it has none) before the arguments. `behind` may stand after them."""

    def body(answer: Answer) -> Steps[None]:
        name, call_id = yield from head(answer)
        if not name:
            return
        yield from answer.blanks()
        if not (yield from answer.ahead("{")):
            return
        answer.begin(name, call_id)
        whole = yield from answer.json.value(answer, answer.add)
        if whole and behind:
            yield from answer.take(behind)

    return body
