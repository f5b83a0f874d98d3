"""The matchers of rows whose text keeps to a grammar, and the masks of their next tokens. No torch.

The matcher (llguidance) of a row is advanced by the row's own tokens and is rebuilt from them where the row begins anew, so it is a
function of the tokens alone. All of this runs in a process that may die of a grammar (mask_child.py); grammars.py is the worker's side.

A step that verifies drafted tokens wants the masks behind these, too: they are pushed for that alone, and taken back. So between turns
a matcher stands behind the known tokens, whichever drafts are accepted.

What a request says of tokens by their ids (allowed_token_ids, bad_words, min_tokens) is applied here, too: where the grammar leaves
only the end, the text ends whatever min_tokens says; where nothing is left at all the request ends with an error.
"""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.grammar import Grammar
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime.grammars import first_matcher, told
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.thinking import Budget, Reasoning
from meshlm.workers.rows.changes import I32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


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
    """The news of a step, and the rows whose masks are wanted: one behind their tokens, and one behind each of their drafts."""

    wanted: list[int]
    begins: list[RowBegins] = []
    pushed: list[tuple[int, list[int]]] = []  # tokens of rows
    removed: list[int] = []
    drafts: dict[int, list[int]] = {}  # tokens of wanted rows that are not known yet

    @property
    def num_lines(self) -> list[int]:
        return [1 + len(self.drafts.get(number, ())) for number in self.wanted]


class Turned(Struct, frozen=True, omit_defaults=True):
    """The state of the wanted rows, whose masks are made."""

    errors: dict[int, str] = {}  # why the text of a row cannot go on
    over: list[int] = []  # rows of which any token may come from now on
    behind: dict[int, tuple[int, str]] = {}  # the text of a row cannot go on behind so many of its drafts, and why


class _Known(NamedTuple):
    """A row's state behind its known tokens."""

    num_output: int
    num_consumed: int
    waits: bool
    reasoning: Reasoning | None
    thinking: Budget | None


class RowMatcher:
    """One row's constraint; `matcher` is None for any text. `error`: why its text cannot go on."""

    def __init__(self, compiled: "LLMatcher | None", vocabulary: Vocabulary, begins: RowBegins) -> None:
        """compiled: a matcher at the text's beginning."""
        sampling, grammar = begins.sampling, begins.grammar
        self._begins, self._compiled, self._vocabulary, self._sampling = begins, compiled, vocabulary, sampling
        self._matcher = matcher = None if compiled is None else compiled.deep_copy()
        self._waits = bool(grammar.begins_after)  # for the end of the reasoning: free text goes on up to it
        # something, behind reasoning
        self._must_follow = self._waits and matcher is not None and not matcher.is_accepting()
        self._reasoning: Reasoning | None = None
        if self._waits or grammar.thinking is not None:
            self._reasoning = Reasoning(grammar, vocabulary)
        self._thinking: Budget | None = None
        if grammar.thinking is not None and self._reasoning is not None:
            self._thinking = Budget(grammar.thinking, vocabulary, self._reasoning)
        self._output: list[int] = []
        self._num_consumed = 0  # tokens that the library's matcher has
        self._special = bool(sampling.allowed_token_ids or sampling.bad_words_token_ids or sampling.min_tokens)
        self.error = ""
        self.is_broken = False  # by a draft: it has to begin anew
        self._banned: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # words, by the token before their last one
        for word in sampling.bad_words_token_ids:
            self._banned.setdefault(word[-2:-1], []).append(word)

    @property
    def is_over(self) -> bool:
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
                self._num_consumed += self._matcher.try_consume_tokens(self._vocabulary.tokens_of(rest))
        elif self._matcher is None or self.error or self._matcher.is_stopped():
            return
        elif self._matcher.consume_token(token):
            self._num_consumed += 1
        else:
            self.error = f"its matcher went no further: {told(self._matcher.get_error())}"

    def begin_drafts(self, drafts: list[int]) -> None:
        """Tokens that are pushed from here on, some of these, are taken back by `end_drafts`."""
        reasoning, thinking = self._reasoning, self._thinking
        self._known = _Known(len(self._output), self._num_consumed, self._waits, reasoning, thinking)
        if reasoning is not None and reasoning.is_open:
            self._reasoning = reasoning.copy(drafts)
        if thinking is not None and self._reasoning is not None:
            self._thinking = thinking.copy(self._reasoning)

    def end_drafts(self) -> None:
        """The row stands behind its known tokens again, or is broken: the library's matcher never leaves an error."""
        num_output, num_consumed, self._waits, self._reasoning, self._thinking = self._known
        del self._output[num_output:]
        refused, self._num_consumed, self.error = self._num_consumed - num_consumed, num_consumed, ""
        if self._matcher is not None:
            self.is_broken = self._matcher.is_error() or (refused > 0 and not self._matcher.rollback(refused))

    @property
    def begins(self) -> RowBegins:
        """The row as one that begins with its tokens so far."""
        return replace(self._begins, output=np.array(self._output, np.int32).tobytes())

    @property
    def has_no_lexer(self) -> bool:
        """Whether even the text's beginning has no mask any more: copies of a matcher share a lexer, which never leaves an error."""
        if self._compiled is None:
            return False
        first, words = self._compiled.deep_copy(), np.empty(self._vocabulary.num_words, np.int32)
        first.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return first.is_error()

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
            # an answer of reasoning alone would lack what it must have
            words &= ~self._vocabulary.mask_of(self._vocabulary.eos)
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


def may_come(words: I32, token: int) -> bool:
    """Whether a mask [words] allows the token."""
    return 0 <= token < 32 * len(words) and bool(words[token >> 5] >> (token & 31) & 1)


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

    def _ready(self, text: str, *, anew: bool = False) -> "tuple[LLMatcher | None, str]":
        if not text:
            return None, ""
        with self._lock:
            found = self._compiled.pop(text, None)
        if found is None or anew:
            matcher, error = first_matcher(self.vocabulary(), text)
            found = (None, error) if error else (matcher, "")
        with self._lock:
            self._compiled[text] = found
            if len(self._compiled) > CACHED:
                del self._compiled[next(iter(self._compiled))]
        return found

    def turn(self, turn: Turn, words: I32) -> Turned:
        """Writes the masks of the wanted rows [sum(turn.num_lines), words]."""
        for number in turn.removed:
            self._rows.pop(number, None)
        for begins in turn.begins:
            self._rows[begins.number] = self._begun(begins)
        for number, tokens in turn.pushed:
            row = self._rows[number]
            for token in tokens:
                row.push(token)
        counts = np.array(turn.num_lines)
        lines = dict(zip(turn.wanted, (np.cumsum(counts) - counts).tolist(), strict=True))
        turned = self._verified(lines, turn.drafts, words)
        again = {n: lines[n] for n in (*turned.errors, *turned.behind) if self._rows[n].has_no_lexer}
        if again:  # by what others have met, perhaps, or drafts that are refused: a new lexer tells
            for number in again:
                self._rows[number] = self._begun(self._rows[number].begins, anew=True)
            last = self._verified(again, turn.drafts, words)
            errors = {number: error for number, error in turned.errors.items() if number not in again}
            behind = {number: found for number, found in turned.behind.items() if number not in again}
            turned = Turned(errors | last.errors, turned.over, behind | last.behind)
        for number in turn.drafts:
            if self._rows[number].is_broken:
                self._rows[number] = self._begun(self._rows[number].begins)
        return turned

    def _verified(self, lines: dict[int, int], drafts: dict[int, list[int]], words: I32) -> Turned:
        """Writes the masks of these rows: each in its line, and those behind its drafts in the lines that follow."""
        rows = {number: self._rows[number] for number in lines}
        self._masks([(row, lines[number]) for number, row in rows.items()], words)
        errors = {number: row.error for number, row in rows.items() if row.error}
        over = [number for number, row in rows.items() if row.is_over]
        return Turned(errors, over, self._behind_drafts(lines, drafts, words) if drafts else {})

    def _masks(self, rows: list[tuple[RowMatcher, int]], words: I32) -> None:
        compute = [(found, line) for row, line in rows if (found := row.computes) is not None]
        if self._num_threads > 1 and len(compute) >= AT_ONCE:
            self._in_threads(compute, words)
        else:
            begin, size = words.ctypes.data, words.shape[1] * words.itemsize
            for matcher, line in compute:
                matcher.unsafe_compute_mask_ptr(begin + line * words.strides[0], size)
        for row, line in rows:
            row.finish(words[line])

    def _behind_drafts(
        self, lines: dict[int, int], drafts: dict[int, list[int]], words: I32
    ) -> dict[int, tuple[int, str]]:
        """See Turned.behind. Behind a draft that may not come, and is never accepted for that, any token is allowed."""
        going = [(number, self._rows[number], line) for number, line in lines.items() if number in drafts]
        drafting, behind, nth = list[RowMatcher](), dict[int, tuple[int, str]](), 0
        for number, row, _ in going:
            if not row.error:
                drafting.append(row)
                row.begin_drafts(drafts[number])
        while going:
            goes_on = []
            for number, row, line in going:
                if nth == (count := len(drafts[number])):
                    continue
                if row.error or not may_come(words[line + nth], token := drafts[number][nth]):
                    words[line + nth + 1 : line + count + 1] = -1
                    continue
                row.push(token)
                goes_on.append((number, row, line))
            going, nth = goes_on, nth + 1
            self._masks([(row, line + nth) for _, row, line in going], words)
            behind |= {number: (nth, row.error) for number, row, _ in going if row.error}
        for row in drafting:
            row.end_drafts()
        return behind

    def _begun(self, begins: RowBegins, *, anew: bool = False) -> RowMatcher:
        """The row, whose tokens are pushed. anew: nobody has its lexer yet, whose work for each token is bounded by itself."""
        compiled, error = self._ready(begins.grammar.text, anew=anew)
        row, words = RowMatcher(compiled, self.vocabulary(), begins), np.empty((1, self.num_words), np.int32)
        for token in np.frombuffer(begins.output, np.int32).tolist():
            if anew:
                self._masks([(row, 0)], words)
            row.push(token)
        row.error = error or row.error
        return row

    def _in_threads(self, compute: "list[tuple[LLMatcher, int]]", words: I32) -> None:
        from llguidance import LLExecutor

        self._executor = self._executor or LLExecutor(self._num_threads)
        self._executor.unsafe_compute_mask_ptr(compute, words.ctypes.data, words.strides[0], len(words))
