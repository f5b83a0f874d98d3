"""Hashes of prefixes: a sha256 chain over full blocks of token ids, keyed by what else decides their KV contents."""

import hashlib
from array import array
from functools import lru_cache


@lru_cache(maxsize=256)
def seed_hash(cache_salt: str = "", lora: str = "", media: str = "") -> bytes:
    """The start of a chain. Requests with different salts, adapters or media never share a block."""
    return hashlib.sha256("\x00".join((cache_salt, lora, media)).encode()).digest()


def extend(hashes: list[bytes], seed: bytes, token_ids: "array[int]", block_size: int, num_tokens: int) -> None:
    """Append the hashes of the full blocks within the first `num_tokens` tokens that are not there yet."""
    sha256, size = hashlib.sha256, block_size * token_ids.itemsize
    previous = hashes[-1] if hashes else seed
    new = memoryview(token_ids)[len(hashes) * block_size : num_tokens // block_size * block_size].tobytes()
    for start in range(0, len(new), size):
        previous = sha256(previous + new[start : start + size]).digest()
        hashes.append(previous)
