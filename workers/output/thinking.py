"""The reasoning of a row, by its tokens: where it ends, and how far it is within its budget. Used by matchers.py, in its process.

No torch.
"""

import codecs
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from meshlm.protocol.grammar import Grammar, ThinkingBudget
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.splitter import Splitter
from meshlm.runtime.vocabulary import Vocabulary

MAX_UNSURE = 64  # tokens behind the budget in which it may show whether a call has begun


class Reasoning:
    """The row's text so far. `is_open`: no closing text has come."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        """ParserError where this process lacks the parser of calls."""
        budget, self._grammar, self._vocabulary = grammar.thinking, grammar, vocabulary
        form = ReasoningParser("", grammar.begins_after)
        if budget is not None:
            form = ReasoningParser(budget.open, budget.close, assumed=budget.assumed)
        calls = registry.tool_parser(grammar.calls) if grammar.calls else None
        tools: Mapping[str, Mapping[str, Any]] = {name: {} for name in grammar.tools}
        self._splitter = Splitter(form, calls, tools)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = bytearray()
        self._passes = False  # what is pushed tells nothing
        # An answer that is a call ends without the closing text: also where calls are told from text in another way than by their tags.
        self._other_calls = calls is not None and not calls.ends_reasoning

    @property
    def is_open(self) -> bool:
        return not self._splitter.closed

    @property
    def is_over(self) -> bool:
        return self._splitter.is_over

    @property
    def may_end(self) -> bool:
        return self._splitter.is_over or self._other_calls

    @property
    def is_unsure(self) -> bool:
        """Whether what was written last may be the begin of a call."""
        return self._splitter.is_unsure

    def push(self, token: int) -> bytes:
        """One more token; gives what of it stands behind the closing text."""
        return b"" if self._passes else self._push(self._vocabulary.bytes_of(token))

    def _push(self, text: bytes) -> bytes:
        self._text += text
        rest = self._splitter.push(self._decoder.decode(text)).rest
        return b"" if self.is_open else rest.encode() + self._decoder.getstate()[0]

    def copy(self, tokens: Sequence[int]) -> "Reasoning":
        """One that goes on by itself from here, with some of these tokens. Its state is a function of the text, however that is cut."""
        if self._splitter.passes(b"".join(map(self._vocabulary.bytes_of, tokens))):
            made = copy.copy(self)
            made._passes = True
            return made
        made = Reasoning(self._grammar, self._vocabulary)
        made._push(bytes(self._text))
        return made


class Budget:
    """How far the reasoning is within its budget. `forced`: the token that must come next; -1: none."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, reasoning: Reasoning) -> None:
        self._vocabulary, self._assumed, self._reasoning = vocabulary, budget.assumed, reasoning
        self._open, self._close = budget.open.encode(), budget.close.encode()
        self._closing = list[int]()  # tokens that are forced yet
        self._budget = self._left = budget.num_tokens
        self._tail, self._opens = b"", bool(budget.open)  # `opens`: the opening text may still come
        self.is_over = False
        self._check()

    def _check(self) -> None:
        """Force the rest of the closing text where the budget is spent."""
        if self._left <= 0 and not self.is_over and not self._closing and not self._must_wait():
            begun = next(n for n in range(len(self._close) - 1, -1, -1) if self._tail.endswith(self._close[:n]))
            self._closing = self._vocabulary.tokens_of(self._close[begun:])
        self.forced = self._closing[0] if self._closing else -1

    def _must_wait(self) -> bool:
        """Whether the opening text has to come yet, or has begun, or a call may have."""
        if self._opens and (not self._assumed or bool(self._tail.strip())):
            return True
        return self._reasoning.is_unsure and self._left > -MAX_UNSURE

    def push(self, token: int) -> None:
        """One more output token of the row, which the reasoning has been told of."""
        if self.is_over:
            return
        if self._closing:
            self._closing = self._closing[1:]
            self.is_over = not self._closing
        else:
            self._tail += self._vocabulary.bytes_of(token)
            self._left -= 1
            if self._opens:
                self._look_for_opening()
            self.is_over |= self._reasoning.is_over
            self._tail = self._tail if self._opens else self._tail[-len(self._close) :]
        self._check()

    def copy(self, reasoning: Reasoning) -> "Budget":
        """One that goes on by itself from here, as this reasoning does."""
        made = copy.copy(self)
        made._reasoning = reasoning
        return made

    def _look_for_opening(self) -> None:
        """The opening text does not count, nor does what may be a part of it."""
        start = self._tail.lstrip()
        if start.startswith(self._open):
            self._opens, self._tail = False, start.removeprefix(self._open)
            self._left = self._budget
        elif not self._open.startswith(start):
            self._opens, self.is_over = False, not self._assumed
