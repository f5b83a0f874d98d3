"""Reasoning told from the answer: what a model writes before `</think>` (--reasoning-parser). Pure; called by parse.py and answers.py.

The opening tag may be the model's or already stand in the prompt. What is given out after some text is a function of that text alone,
however it is cut into pieces, so a stream that is taken up again repeats nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<think>", "</think>"
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


class Splitter:
    """One answer that begins with reasoning, piece by piece. `closed` once all that follows is content."""

    __slots__ = ("_begun", "_held", "closed")

    def __init__(self) -> None:
        self._held, self._begun, self.closed = "", False, False

    def push(self, piece: str) -> tuple[str, str]:
        """What may be shown: of the reasoning, of the content."""
        if self.closed:
            return "", piece
        text = self._held + piece
        if not self._begun:
            start = text.lstrip()
            if OPEN.startswith(start):  # not enough to know yet; all of it is the tag at most
                self._held = text
                return "", ""
            text = start.removeprefix(OPEN) if start.startswith(OPEN) else text
            self._begun = True
        reasoning, tag, content = text.partition(CLOSE)
        if tag:
            self._held, self.closed = "", True
            return reasoning, content
        keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> str:
        """The reasoning that was held back, when no text follows."""
        held, self._held = self._held, ""
        return "" if not self._begun and held.strip() == OPEN else held


def fields(reasoning: str) -> dict[str, str]:
    """By vLLM's name and by the older one, which many clients read."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
