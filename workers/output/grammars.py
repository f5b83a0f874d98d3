"""Rows whose text keeps to a grammar: their matchers, and the masks of the tokens that may come next. No torch.

The matcher (llguidance) of a row is advanced by the row's own tokens and is rebuilt from them where the row begins anew, so it is a
function of the tokens alone. Owned by the engine and used by its stepper thread, but for `compile`, which other threads call. The
library and the vocabulary are loaded with the first grammar.

What a request says of tokens by their ids (allowed_token_ids, bad_words, min_tokens) is applied here, too: where the grammar leaves
only the end, the text ends whatever min_tokens says; where nothing is left at all the request ends with an error.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.runtime.grammars import first_matcher, told
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.reasoning import Budget, Reasoning
from meshlm.workers.rows import I32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

CACHED = 128  # compiled grammars that are kept for rows to come
MOST_THREADS = 8  # of masks, and half the cores: others have work too
AT_ONCE = 8  # masks that are worth to wake threads for
MAX_UNREAD = 4  # steps whose tokens may wait to be read here: their buffers are used again


class Mark(Protocol):
    """A point in what was launched: tokens are on the host behind it."""

    def synchronize(self) -> None: ...


class _Computed:
    """The mark of a device that computes in step."""

    def synchronize(self) -> None:
        """It was computed at once."""


COMPUTED = _Computed()


class TokenMask(NamedTuple):
    """The tokens that may come: for the lines of logits that have a mask, a bit for each token, lowest first."""

    lines: NDArray[np.intp]  # [m], ascending
    words: I32  # [m, words]

    def of(self, lines: NDArray[np.intp]) -> "TokenMask":
        """The masks of these lines alone, which are ascending, by their places among these."""
        here = np.isin(self.lines, lines)
        return TokenMask(np.searchsorted(lines, self.lines[here]), self.words[here])

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[m, vocab]"""
        return np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def unconstrained(sampling: SamplingParams) -> SamplingParams:
    """The rest of what a row with a grammar asks for: without that which its mask does."""
    if sampling.grammar is None:
        return sampling
    return msgspec.structs.replace(sampling, grammar=None, min_tokens=0, allowed_token_ids=(), bad_words_token_ids=())


class _Unread(NamedTuple):
    """Tokens that were sampled for rows with a grammar, on their way to the host."""

    matchers: "dict[int, RowMatcher]"  # by their lines in tokens
    tokens: I32
    mark: Mark


class RowMatcher:
    """One row's constraint; `matcher` is None for any text. `error`: why its text cannot go on."""

    def __init__(self, matcher: "LLMatcher | None", vocabulary: Vocabulary, sampling: SamplingParams) -> None:
        grammar = sampling.grammar
        assert grammar is not None
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
                words[last >> 5] &= ~_bit(last)
        if len(self._output) < sampling.min_tokens:
            stops = sampling.stop_token_ids + sampling.eos_token_ids
            words &= ~self._vocabulary.mask_of(stops)
            if not words.any():
                words |= may_end
        if not words.any():
            self.error = "with allowed_token_ids, bad_words and stop tokens no token is left that it allows"


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)


class Grammars:
    """See the module docstring. `load` gives the vocabulary."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[str, tuple[LLMatcher | None, str]] = {}  # or the error; those used last stand last
        self.rows: dict[int, RowMatcher] = {}
        self._unread: list[_Unread] = []
        self._executor: LLExecutor | None = None
        self._num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2)

    def prepare(self) -> Vocabulary:
        """Loads the vocabulary, if it is not there yet: half a second for a large one, in which no other thread runs."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def prepare_ahead(self) -> None:
        """Loads the vocabulary in a thread. What is wrong with it, the first grammar says."""
        ThreadPoolExecutor(1, "vocabulary").submit(self.prepare)

    def compile(self, text: str) -> str:
        """Have the grammar ready for rows; why it cannot be. Called in any thread."""
        return self._ready(text)[1]

    def _ready(self, text: str) -> "tuple[LLMatcher | None, str]":
        if not text:
            return None, ""
        vocabulary = self.prepare()
        with self._lock:
            found = self._compiled.pop(text, None)
        if found is None:
            matcher, error = first_matcher(vocabulary, text)
            found = (None, error) if error else (matcher, "")
        with self._lock:
            self._compiled[text] = found
            if len(self._compiled) > CACHED:
                del self._compiled[next(iter(self._compiled))]
        return found

    # --- the stepper thread ---

    def reset(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self._unread.clear()

    def apply(self, plan: StepPlan) -> None:
        """Rows that go, rows that come."""
        if self.rows and plan.removed_rows:
            for row in np.frombuffer(plan.removed_rows, np.int32).tolist():
                self.rows.pop(row, None)
        for new in plan.new_rows:
            self.rows.pop(new.row, None)
            if new.sampling.grammar is not None:
                self.rows[new.row] = self._row(new)

    def _row(self, new: NewRow) -> RowMatcher:
        assert new.sampling.grammar is not None
        compiled, error = self._ready(new.sampling.grammar.text)
        matcher = None if compiled is None else compiled.deep_copy()
        row = RowMatcher(matcher, self.prepare(), new.sampling)
        for token in np.frombuffer(new.token_ids, np.int32)[new.num_prompt_tokens :].tolist():
            row.push(token)
        row.error = error or row.error
        return row

    def of_step(self, rows: I32) -> "Constraint":
        """The constraint of a step in which these rows sample."""
        if not self.rows:
            return Constraint(self, {})
        found = {line: self.rows[row] for line, row in enumerate(rows.tolist()) if row in self.rows}
        return Constraint(self, {line: matcher for line, matcher in found.items() if not matcher.is_over})

    def mask(self, matchers: dict[int, RowMatcher], take: "Callable[[int], I32] | None") -> TokenMask:
        """The masks of the next tokens of these lines. Waits for the tokens of earlier steps."""
        self.advance()
        count = len(matchers)
        words = np.empty((count, self.prepare().num_words), np.int32) if take is None else take(count)
        compute = [(found, nth) for nth, row in enumerate(matchers.values()) if (found := row.computes) is not None]
        if self._num_threads > 1 and len(compute) >= AT_ONCE:
            self._in_threads(compute, words)
        else:
            for matcher, nth in compute:
                matcher.unsafe_compute_mask_ptr(words[nth].ctypes.data, words[nth].nbytes)
        for row, each in zip(matchers.values(), words, strict=True):
            row.finish(each)
        return TokenMask(np.fromiter(matchers, np.intp), words)

    def _in_threads(self, compute: "list[tuple[LLMatcher, int]]", words: I32) -> None:
        from llguidance import LLExecutor

        self._executor = self._executor or LLExecutor(self._num_threads)
        self._executor.unsafe_compute_mask_ptr(compute, words.ctypes.data, words.strides[0], len(words))

    def sampled(self, matchers: dict[int, RowMatcher], tokens: I32, mark: Mark) -> None:
        """The tokens of these lines are on the host behind the mark."""
        self._unread.append(_Unread(matchers, tokens, mark))
        if len(self._unread) > MAX_UNREAD:
            self.advance()

    def advance(self) -> None:
        """Reads all tokens that are on their way."""
        unread, self._unread = self._unread, []
        for matchers, tokens, mark in unread:
            mark.synchronize()
            for line, matcher in matchers.items():
                if (token := int(tokens[line])) >= 0:  # else no token could be chosen, and the row ends
                    matcher.push(token)


class Constraint:
    """One step's rows with a grammar, by their lines among those that sample; few steps have any."""

    __slots__ = ("_grammars", "_matchers", "failed")

    def __init__(self, grammars: Grammars, matchers: dict[int, RowMatcher]) -> None:
        self._grammars, self._matchers = grammars, matchers
        self.failed: dict[int, str] = {}  # by line: why the row's text cannot go on

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def has(self, line: int) -> bool:
        return line in self._matchers

    def mask(self, take: Callable[[int], I32] | None = None) -> TokenMask | None:
        """Called when the model is launched: what follows waits for the tokens of the step before. take: where masks are written, of so
        many lines."""
        if not self._matchers:
            return None
        mask = self._grammars.mask(self._matchers, take)
        self.failed = {line: matcher.error for line, matcher in self._matchers.items() if matcher.error}
        return mask

    def sampled(self, tokens: I32, mark: Mark) -> None:
        """The step's tokens [lines] are on the host behind the mark."""
        if self._matchers:
            self._grammars.sampled(self._matchers, tokens, mark)
