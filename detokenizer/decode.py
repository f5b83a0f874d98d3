"""Token ids to text, one token at a time, never half a character.

The text after k tokens is a pure function of those k ids, so a resumed stream repeats nothing. Byte-level vocabularies have a
table of texts; only tokens that begin or end inside a UTF-8 character take the slow path. Bytes stay pending only while they
are the beginning of a character; invalid ones become U+FFFD at once, as in a decode of the whole.
"""

import codecs
from array import array
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from meshlm.protocol.logprobs import pending_after, shown
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer, token_bytes

_utf8 = codecs.getincrementaldecoder("utf-8")


class Decoder(Protocol):
    def push(self, token: int) -> str:
        """The text that this token completes."""
        ...

    def finish(self) -> str:
        """The text that is left when no token follows."""
        ...


class TokenTable:
    """The text of every token that is whole characters, and of the others, a hundredth of them, the bytes."""

    def __init__(self, loaded: LoadedTokenizer) -> None:
        tokenizer = loaded.tokenizer
        self.byte_level = loaded.byte_level
        self.tokenizer: Tokenizer = tokenizer
        self.special = loaded.special_ids
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.cut: dict[int, bytes] = {}
        self.text: list[str | None] = [""] * size
        for index, data in enumerate(token_bytes(loaded)):
            try:
                self.text[index] = data.decode()
            except UnicodeDecodeError:
                self.text[index], self.cut[index] = None, data
        self.shown = ["" if index in self.special else text for index, text in enumerate(self.text)]
        self._kept: dict[tuple[str, ...], tuple[list[str | None], frozenset[int]]] = {}

    def __len__(self) -> int:
        return len(self.text)

    def decoder(self, skip_special_tokens: bool, keep: tuple[str, ...] = ()) -> Decoder:
        """A new stream. `keep` names special tokens that are shown although others are skipped."""
        texts, skip = self._skipping(keep) if skip_special_tokens else (self.text, frozenset[int]())
        return _ByteDecoder(texts, self.cut, skip) if self.byte_level else _StreamDecoder(self.tokenizer, skip)

    def _skipping(self, keep: tuple[str, ...]) -> tuple[list[str | None], frozenset[int]]:
        """The texts and the special tokens that are skipped. There are as many `keep`s as parsers, so they are remembered."""
        found = self._kept.get(keep)
        if found is None:
            kept = {index for index in self.special if self.text[index] in keep}
            skip, texts = self.special - kept, self.shown
            if kept:
                texts = self.shown.copy()
                for index in kept:
                    texts[index] = self.text[index]
            found = self._kept[keep] = (texts, skip)
        return found

    def show(self, token: int, pending: bytes = b"") -> tuple[str, bytes]:
        """A token for logprobs: its text, without a character that goes on behind it and with one that began before it (`pending`),
        and its own bytes."""
        if not 0 <= token < len(self):
            return "", b""
        text = self.text[token]
        if text is not None:
            return text, text.encode()
        return shown(self.cut[token], pending), self.cut[token]

    def pending(self, before: "array[int]") -> bytes:
        """The bytes of a character that is not whole after these tokens; the last LONGEST_BEGIN of all say it."""
        return pending_after(before, self.cut)

    def name(self, token: int) -> str:
        """The vocabulary's own string of a token, such as "Ġthe"; empty where it has none."""
        return self.tokenizer.id_to_token(token) or ""


class _ByteDecoder:
    __slots__ = ("_cut", "_reader", "_skip", "partial", "texts")

    def __init__(self, texts: list[str | None], cut: dict[int, bytes], skip: frozenset[int]) -> None:
        self.texts, self._cut, self._skip = texts, cut, skip
        self._reader: codecs.IncrementalDecoder | None = None  # most streams need none
        self.partial = False

    def push(self, token: int) -> str:
        if not self.partial:
            try:
                text = self.texts[token]
            except IndexError:
                return ""
            if text is not None:
                return text
            if token in self._skip:
                return ""
        elif token in self._skip or token >= len(self.texts):
            return ""
        if self._reader is None:
            self._reader = _utf8("replace")
        whole = self.texts[token]
        text = self._reader.decode(self._cut[token] if whole is None else whole.encode())
        self.partial = bool(self._reader.getstate()[0])
        return text

    def finish(self) -> str:
        if not self.partial or self._reader is None:
            return ""
        self.partial = False
        return self._reader.decode(b"", final=True)


class _StreamDecoder:
    """Any other tokenizer, by the library's own incremental decoding."""

    __slots__ = ("_emitted", "_ids", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._ids.append(token)
        text = self._stream.step(self._tokenizer, token) or ""
        self._emitted += len(text)
        return text

    def finish(self) -> str:
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return whole[self._emitted :]
