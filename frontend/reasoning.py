"""Reasoning told from the answer: what a model writes before `</think>` (--reasoning-parser). Pure; called by parse.py, responses.py.

The opening tag may be the model's or already stand in the prompt. What is given out after some text is a function of that text alone,
however it is cut into pieces, so a stream that is taken up again repeats nothing.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from meshlm.frontend import tool_calls
from meshlm.frontend.tags import Lexer

OPEN, CLOSE = TAGS = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")  # of chat templates


def begins(
    parser: str, template_kwargs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], goes_on: bool
) -> bool:
    """Whether an answer begins with reasoning. `goes_on`: it is the rest of the last message."""
    if not parser:
        return False
    if goes_on:
        before = messages[-1].get("content")
        return isinstance(before, str) and OPEN in before and CLOSE not in before
    switched_off = any(template_kwargs.get(switch) is False for switch in SWITCHES)
    return parser == "deepseek_r1" or not switched_off


class _State(Enum):
    """REASONING <-> CALL, a tag that opens a call stood there -> CONTENT, it was one."""

    REASONING = "reasoning"
    CALL = "call"
    CONTENT = "content"


class Splitter:
    """One answer that begins with reasoning, piece by piece. `closed` once all that follows is content.

    With `calls`, a whole tool call ends the reasoning too: models begin one without closing their reasoning. A tag of calls that is
    only spoken of ends nothing. What follows such a call is content; the closing tag that may still come is nobody's.
    """

    __slots__ = ("_begun", "_body", "_held", "_lexer", "_state", "closed")

    def __init__(self, *, calls: bool = False) -> None:
        self._lexer = Lexer(CLOSE, tool_calls.OPEN, tool_calls.CLOSE) if calls else Lexer(CLOSE)
        self._held, self._begun, self._state = "", False, _State.REASONING
        self._body: list[str] = []  # what stands behind a tag that opens a call
        self.closed = False

    def push(self, piece: str) -> tuple[str, str]:
        """Takes the next text; gives the reasoning and the content that may be shown now."""
        if self.closed:
            return "", piece
        if not self._begun:
            piece = self._held + piece
            start = piece.lstrip()
            if OPEN.startswith(start):  # not enough to know yet; all of it is the tag at most
                self._held = piece
                return "", ""
            piece = start.removeprefix(OPEN) if start.startswith(OPEN) else piece
            self._begun, self._held = True, ""
        reasoning, content = list[str](), list[str]()
        for place, part in enumerate(self._lexer.push(piece)):
            self._take(part, place % 2 == 1, reasoning, content)
        if self.closed:
            content.append(self._lexer.finish())
        return "".join(reasoning), "".join(content)

    def finish(self) -> tuple[str, str]:
        """Gives the reasoning and the content that were held back, when no text follows."""
        if self.closed:
            return "", ""
        if not self._begun:
            held, self._held = self._held, ""
            return "" if held.strip() == OPEN else held, ""
        reasoning, content = list[str](), list[str]()
        self._take(self._lexer.finish(), False, reasoning, content)
        if self._state is _State.CALL:
            self._end_call("", reasoning, content)
        return "".join(reasoning), "".join(content)

    def _take(self, part: str, is_tag: bool, reasoning: list[str], content: list[str]) -> None:
        if self.closed:
            content.append(part)
        elif is_tag and part == CLOSE:
            if self._state is _State.CALL:
                reasoning += [tool_calls.OPEN, *self._body]
            self.closed = True
        elif self._state is _State.CONTENT:
            content.append(part)
        elif self._state is _State.CALL:
            if is_tag and part == tool_calls.CLOSE:
                self._end_call(part, reasoning, content)
            else:
                self._body.append(part)
        elif is_tag and part == tool_calls.OPEN:
            self._state, self._body = _State.CALL, []
        else:
            reasoning.append(part)

    def _end_call(self, close: str, reasoning: list[str], content: list[str]) -> None:
        """The text between two tags is complete: before the first tool call in it is reasoning, from that on content."""
        parts = tool_calls.cut_calls("".join(self._body))
        first = next((place for place, part in enumerate(parts) if tool_calls.read_call(part)), None)
        reasoning += [tool_calls.OPEN + part for part in parts[:first]]
        if first is None:
            reasoning.append(close)
            self._state = _State.REASONING
        else:
            content += [*(tool_calls.OPEN + part for part in parts[first:]), close]
            self._state = _State.CONTENT


def fields(reasoning: str) -> dict[str, str]:
    """The reasoning by vLLM's name and by the older one, which many clients read."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
