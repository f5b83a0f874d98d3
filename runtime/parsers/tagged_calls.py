"""Calls that begin with a tag, anywhere in an answer: the finder of most formats in tools/. Pure."""

import re
from collections.abc import Callable

from msgspec import Struct

from meshlm.runtime.parsers.calls import Call, Tools
from meshlm.runtime.parsers.quoting import JsonQuoting, Quoting
from meshlm.runtime.parsers.tags import Lexer


class TaggedForm(Struct, frozen=True):
    """How calls stand in a text. `read` gives the calls that are the whole of a body, none where it is something else."""

    read: Callable[[str, Tools], list[Call]]
    opens: tuple[str, ...]
    close: str = ""  # empty: a body ends with its JSON value, before the next opening tag, or with the answer
    quoting: Callable[[], Quoting] = JsonQuoting
    wrappers: tuple[()] | tuple[str, str] = ()  # tags around one or more calls, which are nobody's text there
    inner: tuple[str, ...] = ()  # tags within a body that are no part of its JSON
    needs_close: bool = False  # a body without it may lack arguments
    prefix: str = ""  # the end of the opening tag that the body begins with


class TaggedCalls:
    """One answer, piece by piece; see Finder."""

    __slots__ = ("_body", "_form", "_lexer", "_opener", "_pending", "_quoting", "_strict", "_tools")

    def __init__(self, form: TaggedForm, tools: Tools) -> None:
        self._form, self._tools = form, tools
        self._lexer = self._new_lexer()
        self._body: list[str] | None = None  # what stands behind an opening tag so far
        self._opener, self._quoting = "", form.quoting()
        self._strict = False  # a closing tag ends a body even within a string
        # Blanks and wrappers since a call, or since a wrapper: nobody's if a call follows, and behind a call if the end does.
        self._pending: tuple[bool, list[str]] | None = None

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Takes the next text; gives the content that may be shown, and the calls that are complete."""
        shown, calls = list[str](), list[Call]()
        for place, part in enumerate(self._lexer.push(piece)):
            self._take(part, place % 2 == 1, shown, calls)
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, when no text follows: a call may lack its end."""
        shown, calls = list[str](), list[Call]()
        self._take(self._lexer.finish(), False, shown, calls)
        if self._body is not None:
            self._end_unclosed(shown, calls)
        if self._pending is not None:
            behind_call, texts = self._pending
            shown += [] if behind_call else texts
            self._pending = None
        return "".join(shown), calls

    def _new_lexer(self) -> Lexer:
        form = self._form
        return Lexer(*form.opens, *((form.close,) if form.close else ()), *form.wrappers, *form.inner)

    def _take(self, part: str, is_tag: bool, shown: list[str], calls: list[Call]) -> None:
        form = self._form
        if self._body is None:
            if is_tag and part in form.opens:
                self._begin(part)
            elif is_tag and part in form.wrappers:
                self._wrapper(part)
            else:
                self._text(part, shown)
            return
        quoted = self._quoting.inside and not self._strict
        if is_tag and part == form.close and not quoted:
            self._end(form.close, shown, calls)
        elif is_tag and part in form.opens and not quoted and not form.close:
            self._end("", shown, calls)
            self._begin(part)
        else:
            if is_tag and part in form.opens and not quoted:
                self._quoting = form.quoting()  # the end of the call before is missing
            end = -1 if is_tag and part in form.inner and not quoted else self._quoting.push(part)
            if form.close or end < 0:
                self._body.append(part)
            else:
                self._body.append(part[:end])
                self._end("", shown, calls)
                self._text(part[end:], shown)

    def _begin(self, opener: str) -> None:
        self._opener, self._body, self._quoting = opener, [], self._form.quoting()
        self._quoting.push(self._form.prefix)

    def _wrapper(self, tag: str) -> None:
        if self._pending is None:
            self._pending = False, []
        if self._pending[0] and tag in self._form.wrappers[1:]:
            self._pending = True, []
        else:
            self._pending[1].append(tag)

    def _text(self, text: str, shown: list[str]) -> None:
        if self._pending is None:
            shown.append(text)
        elif not text or text.isspace():
            self._pending[1].append(text)
        else:
            shown += [*self._pending[1], text]
            self._pending = None

    def _end(self, close: str, shown: list[str], calls: list[Call]) -> None:
        """Take in what stood between the tags: calls, and the text of what is none."""
        body, self._body = "".join(self._body or ()), None
        if found := self._read(body, close):
            self._found(found, calls)
            return
        # The end of a call may be missing, or its tag was only spoken of.
        parts = [self._opener, *re.split("(" + "|".join(map(re.escape, self._form.opens)) + ")", body)]
        for at in range(0, len(parts), 2):
            end = close if at == len(parts) - 2 else ""
            if len(parts) > 2 and (found := self._read(parts[at + 1], end)):
                self._found(found, calls)
            else:
                self._text(parts[at] + parts[at + 1] + end, shown)

    def _found(self, found: list[Call], calls: list[Call]) -> None:
        calls += found
        self._pending = True, []

    def _end_unclosed(self, shown: list[str], calls: list[Call]) -> None:
        """A closing tag in the body may have been a real one: a string that never ended only looked so as if it held it."""
        close, body = self._form.close, "".join(self._body or ())
        if close and close in body and not self._read(body, ""):
            first, _, rest = body.partition(close)
            self._body, self._strict = [first], True
            self._end(close, shown, calls)
            lexer = self._new_lexer()
            for place, part in enumerate([*lexer.push(rest), "", lexer.finish()]):
                self._take(part, place % 2 == 1, shown, calls)
        if self._body is not None:
            self._end("", shown, calls)

    def _read(self, body: str, close: str) -> list[Call]:
        if self._form.needs_close and not close:
            return []
        return self._form.read(self._form.prefix + body, self._tools)
