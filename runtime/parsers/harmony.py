"""The channels of gpt-oss (harmony): messages of reasoning, of content, and of calls, each behind a head that says which. Pure.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; a call of a tool is a message to
`functions.name`. Messages to others (a browser, an interpreter) are the model's own work and count as reasoning.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers.calls import Call, Changed, Part, Tools
from meshlm.runtime.parsers.scan import Scan, Sink, Steps, Tags
from meshlm.runtime.parsers.structures import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE, START

END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_HEAD_ENDS, _BODY_ENDS = Tags(MESSAGE, END, CALL, RETURN), Tags(START, END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def forced_call(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The format of a structural tag for an answer that is a call of one of these functions, behind its reasoning if it has some.

    The model's end of a call ends the answer, too, so there is one."""
    tag = {"type": "tag", "begin": f"{CHANNEL}analysis{MESSAGE}", "end": f"{END}{START}assistant"}
    calls = [
        nodes.sequence(
            nodes.const(f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"), nodes.json_schema(given)
        )
        for name, given in schemas.items()
    ]
    reasoning = nodes.optional({**tag, "content": nodes.ANY_TEXT})
    return nodes.sequence(reasoning, nodes.any_of(calls))


class Reasoned(Struct, frozen=True):
    """A part of the reasoning."""

    text: str


class Channels:
    """One answer, piece by piece. `opened`: it goes on with a message of the final channel."""

    __slots__ = ("_num_calls", "_opened", "_parts", "_said", "_scan", "_steps", "_tools", "in_call")

    def __init__(self, tools: Tools, *, opened: bool = False) -> None:
        self._scan, self._tools, self._opened = Scan(), tools, opened
        self._parts = list[Part | Reasoned]()
        self._said: dict[bool, bool] = {}  # whether there was reasoning, and content
        self.in_call = False
        self._steps = self._read()

    def push(self, piece: str) -> list[Part | Reasoned]:
        """Takes the next text; gives what it brings, in order."""
        self._scan.feed(piece)
        return self._go_on()

    def finish(self) -> list[Part | Reasoned]:
        """The rest, when no text follows."""
        self._scan.ended = True
        return self._go_on()

    def _go_on(self) -> list[Part | Reasoned]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Steps[None]:
        scan = self._scan
        if self._opened:
            yield from self._body(self._content)
        while (yield from scan.next()):
            head = (yield from self._head()) if (yield from scan.ahead(START, CHANNEL, MESSAGE)) else None
            if head is None:  # no head where one must be: what the model writes is content
                yield from self._text()
            else:
                yield from self._message(head)

    def _head(self) -> Steps[str | None]:
        """The text before a message; None where there is no message behind it."""
        scan = self._scan
        scan.hold()
        text, tag = yield from scan.upto(_HEAD_ENDS)
        if tag == MESSAGE:
            scan.drop()
            return text
        scan.back()
        return None

    def _text(self) -> Steps[None]:
        """Content without a head, with the tag that it begins with."""
        tag = yield from self._scan.take(*TAGS)
        self._content(tag if tag not in (START, END, CALL, RETURN) else "")
        yield from self._body(self._content)

    def _message(self, head: str) -> Steps[None]:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        to = recipient[1] if recipient else ""
        if to.startswith(FUNCTIONS) and self._tools:
            self._parts.append(Call(to.removeprefix(FUNCTIONS) or to, ""))
            self.in_call, self._num_calls = True, 0
            yield from self._body(self._argument)
            if not self._num_calls:
                self._argument("{}")
            self.in_call = False
            return
        reasons = bool(to) or (channel is not None and channel[1] == "analysis")
        if self._said.get(reasons):
            (self._reasoning if reasons else self._content)("\n")
        yield from self._body(self._reasoning if reasons else self._content)

    def _body(self, sink: Sink) -> Steps[None]:
        """The text of a message, up to its end or the next one's head."""
        tag = yield from self._scan.stream(_BODY_ENDS, sink)
        if tag == START:
            self._scan.at -= len(tag)

    def _content(self, text: str) -> None:
        if text:
            self._said[False] = True
            self._parts.append(text)

    def _reasoning(self, text: str) -> None:
        if text:
            self._said[True] = True
            self._parts.append(Reasoned(text))

    def _argument(self, text: str) -> None:
        self._num_calls += len(text)
        self._parts.append(Call("", text))


def channel_calls(tools: Tools) -> Changed:
    """The calls of an answer whose reasoning is content; see Finder."""

    def as_content(parts: Iterable[Part | Reasoned]) -> list[Part]:
        return [part.text if isinstance(part, Reasoned) else part for part in parts]

    return Changed(Channels(tools), as_content)
