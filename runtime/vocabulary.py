"""The vocabulary as the matchers of grammars need it: the bytes of each token, and bits for sets of tokens. No torch."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshlm.runtime.model_files import tokenizer_files

if TYPE_CHECKING:
    import llguidance

CHECKED_EVERY = 61  # tokens: one of so many tells a tokenizer that is read otherwise
MARK = 0xFF  # of the library, and in no text
MASKS = 64  # sets of tokens that are kept as bits
CHARACTER = r'[^"\\\x00-\x1F\x7F]'  # of a text in quotes, as the library has it in its own sets, from ten characters on
SHORT = 9


class Vocabulary:
    """`tokenizer` is the library's. `num_words`: of a mask, 32 tokens each."""

    def __init__(self, loaded: tokenizer_files.LoadedTokenizer, vocab_size: int, eos: tuple[int, ...]) -> None:
        """vocab_size: of the logits. Ids without a token never come."""
        texts = tokenizer_files.token_bytes(loaded)[:vocab_size]
        self._texts = texts + [b""] * (vocab_size - len(texts))
        self.eos = eos
        self.num_words = -(-vocab_size // 32)
        read = _read(loaded, self._texts, eos) or _told(loaded, self._texts, eos)
        self.tokenizer: llguidance.LLTokenizer = read.with_slices(_slices(read))
        self.mask_of: Callable[[tuple[int, ...]], NDArray[np.int32]] = lru_cache(MASKS)(self._mask_of)

    def bytes_of(self, token: int) -> bytes:
        return self._texts[token] if 0 <= token < len(self._texts) else b""

    def lack(self, text: bytes) -> str:
        """Says which byte of the text is in no token; empty: each is in some. Special tokens stand in it as MARK and their names."""
        for byte in set(text) - {MARK}:
            if not any(byte in token for token in self._texts):
                return f"this model's vocabulary has no token with the byte 0x{byte:02x} that must come"
        return ""

    def tokens_of(self, text: bytes) -> list[int]:
        """Of ids that have logits: where the tokenizer has one beyond them, the text is written in the others, the longest first."""
        found = self.tokenizer.tokenize_bytes(text)
        return found if max(found, default=0) < len(self._texts) else self._written_out(text)

    def _written_out(self, text: bytes) -> list[int]:
        known = {
            known_bytes: token for token, known_bytes in enumerate(self._texts) if known_bytes and known_bytes in text
        }
        found = []
        while text and (known_bytes := max(filter(text.startswith, known), key=len, default=b"")):
            found.append(known[known_bytes])
            text = text[len(known_bytes) :]
        return found

    def _mask_of(self, tokens: Iterable[int]) -> NDArray[np.int32]:
        bits = np.zeros(self.num_words * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _slices(tokenizer: "llguidance.LLTokenizer") -> list[str]:
    """Sets of tokens that the library allows at once: of texts in quotes of so many characters, also of the few before maxLength."""
    blanks, *texts = tokenizer.general_slices()
    return [blanks, *(f"{CHARACTER}{{1,{most}}}" for most in range(1, SHORT)), *texts]


def _read(
    loaded: tokenizer_files.LoadedTokenizer, texts: list[bytes], eos: tuple[int, ...]
) -> "llguidance.LLTokenizer | None":
    """The library's own reading of the tokenizer, whose threads then need no Python; None where it reads another one."""
    from llguidance import LLTokenizer

    try:
        found = LLTokenizer(loaded.tokenizer.to_str(), n_vocab=len(texts), eos_token=list(eos))
    except ValueError:
        return None
    plain = [token for token in range(0, len(texts), CHECKED_EVERY) if token not in loaded.special_ids]
    same = [found.decode_bytes([token]) == texts[token] for token in plain if texts[token] not in (b"", b"\xff")]
    return found if all(same) else None


def _told(
    loaded: tokenizer_files.LoadedTokenizer, texts: list[bytes], eos: tuple[int, ...]
) -> "llguidance.LLTokenizer":
    """By the bytes of each token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    special = sorted(token for token in loaded.special_ids if token < len(texts))
    names = TokenizerWrapper(_Names(loaded, texts, special, eos[0]))
    return LLTokenizer(names, n_vocab=len(texts), eos_token=list(eos))


class _Names:
    """What the library asks of a tokenizer."""

    def __init__(
        self, loaded: tokenizer_files.LoadedTokenizer, texts: list[bytes], special: list[int], eos: int
    ) -> None:
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens, self.special_token_ids = texts, special
        self._tokenizer: Any = loaded.tokenizer

    def __call__(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found
