"""From columns of log-probabilities, as they travel, to entries, as clients read them. Pure.

The detokenizer, which knows every token's text, makes the entries of output tokens. Those of a prompt may be a quarter of a million, so
they travel as columns (PromptLogprobs), and who answers the client makes the entries, one position after the other.
"""

import codecs
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from meshlm.protocol.edges.text import PositionLogprobs, PromptLogprobs, TokenLogprob
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.wire.columns import unpack_f32, unpack_i32

LONGEST_BEGIN = 3  # bytes of a character that is not whole, and so the most tokens that they can come from
_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTexts(Protocol):
    """Gives the texts of tokens."""

    def show(self, token: int, pending: bytes = b"") -> tuple[str, bytes]:
        """Its text, without a character that goes on behind it and with one that began before it (`pending`), and its own bytes."""
        ...

    def pending(self, before: "array[int]") -> bytes:
        """The bytes of a character that is not whole after these tokens; the last LONGEST_BEGIN of all say it."""
        ...


def shown(cut: bytes, pending: bytes) -> str:
    """The text of a token that begins or ends inside a character."""
    return _utf8("replace").decode(pending + cut)


def pending_after(before: "array[int]", cut: Mapping[int, bytes]) -> bytes:
    """See TokenTexts.pending. `cut`: the bytes of tokens that begin or end inside a character."""
    data = b""
    for token in reversed(before):
        if token not in cut:
            break
        data = cut[token] + data
    if not data:
        return b""
    reader = _utf8("replace")
    reader.decode(data)
    return reader.getstate()[0]


def each_position(
    columns: LogprobColumns, ids: "array[int]", sizes: Iterable[int], begin: int, texts: TokenTexts, first: int = 0
) -> Iterator[PositionLogprobs]:
    """An entry for each of `sizes`, the characters that ids[begin] and those behind it bring to the text. `first`: of them, in the
    columns."""
    logprobs, ranks = unpack_f32(columns.logprobs), unpack_i32(columns.ranks)
    top_ids, top_logprobs = unpack_i32(columns.top_ids), unpack_f32(columns.top_logprobs)
    width, show = columns.width, texts.show
    top_ranks = range(1, width + 1)
    for number, num_chars in enumerate(sizes):
        at, place = begin + number, first + number
        row = slice(place * width, (place + 1) * width)
        pending = texts.pending(ids[max(0, at - LONGEST_BEGIN) : at])
        top = [
            TokenLogprob(token, logprob, rank, *show(token, pending))
            for token, logprob, rank in zip(top_ids[row], top_logprobs[row], top_ranks, strict=True)
            if token >= 0
        ]
        own = TokenLogprob(ids[at], logprobs[place], ranks[place], *show(ids[at], pending))
        yield PositionLogprobs(own, num_chars, tuple(top))


class _Texts:
    """TokenTexts of the tokens in a PromptLogprobs."""

    def __init__(self, found: PromptLogprobs) -> None:
        self._cut = found.cut
        tokens = unpack_i32(found.text_ids)
        self._whole = {token: (text, text.encode()) for token, text in zip(tokens, found.texts, strict=True)}

    def show(self, token: int, pending: bytes = b"") -> tuple[str, bytes]:
        whole = self._whole.get(token)
        return whole if whole is not None else (shown(self._cut[token], pending), self._cut[token])

    def pending(self, before: "array[int]") -> bytes:
        return pending_after(before, self._cut)


def positions_of(found: PromptLogprobs) -> Iterator[PositionLogprobs]:
    """The entries of a prompt's tokens but the first, which has none."""
    sizes = unpack_i32(found.num_chars)
    return each_position(found.columns, array("i", found.token_ids), sizes, 1, _Texts(found))


def num_bytes_of_prompt(found: PromptLogprobs) -> int:
    """The bytes that they take in a message, about."""
    columns = found.columns
    parts = (columns.logprobs, columns.ranks, columns.top_ids, columns.top_logprobs)
    rest = (found.token_ids, found.num_chars, found.text_ids)
    return sum(map(len, (*parts, *rest))) + 4 * len(found.texts) + sum(map(len, found.texts)) + 16 * len(found.cut)
