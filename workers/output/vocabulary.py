"""The vocabulary as the matchers of grammars need it: the bytes of each token, and bits for sets of tokens. No torch."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlm.protocol.config import Resolved
from meshlm.runtime import tokenizer_files
from meshlm.workers.rows import I32

if TYPE_CHECKING:
    pass

MASKS = 64  # sets of tokens that are kept as bits


class Vocabulary:
    """`tokenizer` is the library's. `num_words`: of a mask, 32 tokens each."""

    def __init__(self, loaded: tokenizer_files.LoadedTokenizer, vocab_size: int, eos: tuple[int, ...]) -> None:
        """vocab_size: of the logits. Ids without a token never come."""
        from llguidance import LLTokenizer, TokenizerWrapper

        texts = tokenizer_files.token_bytes(loaded)[:vocab_size]
        self._texts = texts + [b""] * (vocab_size - len(texts))
        self.eos = eos
        self.num_words = -(-vocab_size // 32)
        special = sorted(token for token in loaded.special_ids if token < vocab_size)
        names = _Names(loaded, self._texts, special, eos[0])
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(names), n_vocab=vocab_size, eos_token=list(eos))
        self.mask_of: Callable[[tuple[int, ...]], I32] = lru_cache(MASKS)(self._mask_of)

    def bytes_of(self, token: int) -> bytes:
        return self._texts[token] if 0 <= token < len(self._texts) else b""

    def tokens_of(self, text: bytes) -> list[int]:
        return self.tokenizer.tokenize_bytes(text)

    def _mask_of(self, tokens: Iterable[int]) -> I32:
        bits = np.zeros(self.num_words * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


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


def loader(resolved: Resolved) -> Callable[[], Vocabulary]:
    """Loads the vocabulary of the configured model."""
    return partial(_load, resolved.tokenizer_path, resolved.spec.vocab_size, resolved.eos_token_ids)


def _load(path: str, vocab_size: int, eos: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(Path(path)), vocab_size, eos)
