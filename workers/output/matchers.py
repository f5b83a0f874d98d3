"""The matchers of rows whose text keeps to a grammar, and the masks of their next tokens. No torch.

The matcher (llguidance) of a row is advanced by the row's own tokens and is rebuilt from them where the row begins anew, so it is a
function of the tokens alone. All of this runs in a process that may die of a grammar (mask_child.py); grammars.py is the worker's side.

What a request says of tokens by their ids (allowed_token_ids, bad_words, min_tokens) is applied here, too: where the grammar leaves
only the end, the text ends whatever min_tokens says; where nothing is left at all the request ends with an error.
"""

import codecs
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from meshlm.protocol.grammar import Grammar, ThinkingBudget
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime.grammars import first_matcher, told
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.splitter import Splitter
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.rows.changes import I32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


MAX_UNSURE = 64  # tokens behind the budget in which it may show whether a call has begun


class Reasoning:
    """The row's text so far. `is_open`: no closing text has come."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        """ParserError where this process lacks the parser of calls."""
        budget, self._vocabulary = grammar.thinking, vocabulary
        form = ReasoningParser("", grammar.begins_after)
        if budget is not None:
            form = ReasoningParser(budget.open, budget.close, assumed=budget.assumed)
        calls = registry.tool_parser(grammar.calls) if grammar.calls else None
        tools: Mapping[str, Mapping[str, Any]] = {name: {} for name in grammar.tools}
        self._splitter = Splitter(form, calls, tools)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
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
        """Whether the whole answer may end here."""
        return self._splitter.is_over or self._other_calls

    @property
    def is_unsure(self) -> bool:
        """Whether what was written last may be the begin of a call."""
        return self._splitter.is_unsure

    def push(self, token: int) -> bytes:
        """One more token; gives what of it stands behind the closing text."""
        rest = self._splitter.push(self._decoder.decode(self._vocabulary.bytes_of(token))).rest
        return b"" if self.is_open else rest.encode() + self._decoder.getstate()[0]


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
            del self._closing[0]
            self.is_over = not self._closing
        else:
            self._tail += self._vocabulary.bytes_of(token)
            self._left -= 1
            if self._opens:
                self._look_for_opening()
            self.is_over |= self._reasoning.is_over
            self._tail = self._tail if self._opens else self._tail[-len(self._close) :]
        self._check()

    def _look_for_opening(self) -> None:
        """The opening text does not count, nor does what may be a part of it."""
        start = self._tail.lstrip()
        if start.startswith(self._open):
            self._opens, self._tail = False, start.removeprefix(self._open)
            self._left = self._budget
        elif not self._open.startswith(start):
            self._opens, self.is_over = False, not self._assumed


CACHED = 128  # compiled grammars that are kept for rows to come
MOST_THREADS = 8  # of masks, and half the cores: others have work too
AT_ONCE = 8  # masks that are worth to wake threads for


class RowBegins(Struct, frozen=True):
    """A row, by a number that no other ever has, with the tokens that its output has already."""

    number: int
    sampling: SamplingParams
    grammar: Grammar
    output: bytes  # int32


class Turn(Struct, frozen=True, omit_defaults=True):
    """What is new, and the rows whose masks are wanted."""

    wanted: list[int]
    begins: list[RowBegins] = []
    pushed: list[tuple[int, list[int]]] = []  # tokens of rows
    removed: list[int] = []


class Turned(Struct, frozen=True, omit_defaults=True):
    """What became of the wanted rows, whose masks are made."""

    errors: dict[int, str] = {}  # why the text of a row cannot go on
    over: list[int] = []  # rows of which any token may come from now on


class RowMatcher:
    """One row's constraint; `matcher` is None for any text. `error`: why its text cannot go on."""

    def __init__(
        self, matcher: "LLMatcher | None", vocabulary: Vocabulary, sampling: SamplingParams, grammar: Grammar
    ) -> None:
        self._matcher, self._vocabulary, self._sampling = matcher, vocabulary, sampling
        self._waits = bool(grammar.begins_after)  # for the end of the reasoning: free text goes on up to it
        self._must_follow = (
            self._waits and matcher is not None and not matcher.is_accepting()
        )  # something, behind reasoning
        self._reasoning: Reasoning | None = None
        if self._waits or grammar.thinking is not None:
            self._reasoning = Reasoning(grammar, vocabulary)
        self._thinking: Budget | None = None
        if grammar.thinking is not None and self._reasoning is not None:
            self._thinking = Budget(grammar.thinking, vocabulary, self._reasoning)
        self._output: list[int] = []
        self._special = bool(sampling.allowed_token_ids or sampling.bad_words_token_ids or sampling.min_tokens)
        self.error = ""
        self._banned: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # words, by the token before their last one
        for word in sampling.bad_words_token_ids:
            self._banned.setdefault(word[-2:-1], []).append(word)

    @property
    def is_over(self) -> bool:
        """Any token may come from now on."""
        thinks = self._thinking is not None and not self._thinking.is_over
        return self._matcher is None and not self._special and not thinks and not self.error

    def push(self, token: int) -> None:
        """One more output token of the row. What comes behind the end of the text is nobody's."""
        self._output.append(token)
        rest = b""
        if self._reasoning is not None and self._reasoning.is_open:
            rest = self._reasoning.push(token)
        if self._thinking is not None:
            self._thinking.push(token)
        if self._waits and self._reasoning is not None:
            self._waits = self._reasoning.is_open
            if rest and self._matcher is not None:  # a token that reaches beyond the end of the free text
                self._matcher.try_consume_tokens(self._vocabulary.tokens_of(rest))
        elif self._matcher is None or self.error or self._matcher.is_stopped():
            return
        elif not self._matcher.consume_token(token):
            self.error = f"its matcher went no further: {told(self._matcher.get_error())}"

    @property
    def _forced(self) -> int:
        return -1 if self._thinking is None else self._thinking.forced

    @property
    def computes(self) -> "LLMatcher | None":
        """The library's matcher, where its mask is needed; None where any token may come, or none can, or a certain one must."""
        return None if self._waits or self.error or self._forced >= 0 else self._matcher

    def finish(self, words: I32) -> None:
        """The mask of the next token [words], once the matcher has computed it; see `error` afterwards."""
        if self._forced >= 0 and not self.error:
            words[:] = self._vocabulary.mask_of((self._forced,))
            return
        if not self._waits and not self.error and self._matcher is not None and self._matcher.is_error():
            self.error = told(self._matcher.get_error())
        if self._waits or self.error or self._matcher is None:
            words[:] = -1
        ends_early = self._waits and self._must_follow and self._reasoning is not None and not self._reasoning.may_end
        if ends_early and not self.error:
            words &= ~self._vocabulary.mask_of(
                self._vocabulary.eos
            )  # an answer of reasoning alone would lack what it must have
        if self._special and not self.error:
            self._restrict(words)

    def _restrict(self, words: I32) -> None:
        """Applies what the request says of ids. The text may always end where nothing else is left of the grammar."""
        sampling, ends = self._sampling, self._vocabulary.mask_of(self._vocabulary.eos)
        may_end = words & ends
        if sampling.allowed_token_ids:
            ends_with_grammar = self._matcher is not None and not self._waits
            words &= self._vocabulary.mask_of(sampling.allowed_token_ids) | (ends if ends_with_grammar else 0)
        ends_with = tuple(self._output[-1:])
        for *before, last in (*self._banned.get((), ()), *(self._banned.get(ends_with, ()) if ends_with else ())):
            if not before or self._output[-len(before) :] == before:
                words[last >> 5] &= ~np.uint32(1 << (last & 31)).view(np.int32)
        if len(self._output) < sampling.min_tokens:
            stops = sampling.stop_token_ids + sampling.eos_token_ids
            words &= ~self._vocabulary.mask_of(stops)
            if not words.any():
                words |= may_end
        if not words.any():
            self.error = "with allowed_token_ids, bad_words and stop tokens no token is left that it allows"


class Matchers:
    """See the module docstring. `load` gives the vocabulary. `compile` is called in any thread, `turn` in one."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[str, tuple[LLMatcher | None, str]] = {}  # or the error; those used last stand last
        self._rows: dict[int, RowMatcher] = {}
        self._executor: LLExecutor | None = None
        self._num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2)

    def vocabulary(self) -> Vocabulary:
        """Loads it, if it is not there yet."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    @property
    def num_words(self) -> int:
        return self.vocabulary().num_words

    def start(self) -> None:
        """Nothing is loaded ahead here."""

    def compile(self, text: str) -> str:
        """Have the grammar ready for rows; why it cannot be."""
        return self._ready(text)[1]

    def _ready(self, text: str) -> "tuple[LLMatcher | None, str]":
        if not text:
            return None, ""
        with self._lock:
            found = self._compiled.pop(text, None)
        if found is None:
            matcher, error = first_matcher(self.vocabulary(), text)
            found = (None, error) if error else (matcher, "")
        with self._lock:
            self._compiled[text] = found
            if len(self._compiled) > CACHED:
                del self._compiled[next(iter(self._compiled))]
        return found

    def turn(self, turn: Turn, words: I32) -> Turned:
        """Writes the masks of the wanted rows [wanted, words]."""
        for number in turn.removed:
            self._rows.pop(number, None)
        for begins in turn.begins:
            self._rows[begins.number] = self._begun(begins)
        for number, tokens in turn.pushed:
            row = self._rows[number]
            for token in tokens:
                row.push(token)
        rows = [self._rows[number] for number in turn.wanted]
        compute = [(found, nth) for nth, row in enumerate(rows) if (found := row.computes) is not None]
        if self._num_threads > 1 and len(compute) >= AT_ONCE:
            self._in_threads(compute, words)
        else:
            begin, size = words.ctypes.data, words.shape[1] * words.itemsize
            for matcher, nth in compute:
                matcher.unsafe_compute_mask_ptr(begin + nth * words.strides[0], size)
        for row, each in zip(rows, words, strict=True):
            row.finish(each)
        errors = {number: row.error for number, row in zip(turn.wanted, rows, strict=True) if row.error}
        return Turned(errors, [number for number, row in zip(turn.wanted, rows, strict=True) if row.is_over])

    def _begun(self, begins: RowBegins) -> RowMatcher:
        compiled, error = self._ready(begins.grammar.text)
        matcher = None if compiled is None else compiled.deep_copy()
        row = RowMatcher(matcher, self.vocabulary(), begins.sampling, begins.grammar)
        for token in np.frombuffer(begins.output, np.int32).tolist():
            row.push(token)
        row.error = error or row.error
        return row

    def _in_threads(self, compute: "list[tuple[LLMatcher, int]]", words: I32) -> None:
        from llguidance import LLExecutor

        self._executor = self._executor or LLExecutor(self._num_threads)
        self._executor.unsafe_compute_mask_ptr(compute, words.ctypes.data, words.strides[0], len(words))
