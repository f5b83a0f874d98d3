"""Hashes of prefixes: a sha256 chain over full blocks of token ids, keyed by what else decides their KV contents."""

import hashlib
from array import array


def seed_hash(cache_salt: str = "", lora: str = "", media: str = "") -> bytes:
    """The start of a chain. Requests with different salts, adapters or media never share a block."""
    return hashlib.sha256("\x00".join((cache_salt, lora, media)).encode()).digest()


def extend(hashes: list[bytes], seed: bytes, token_ids: "array[int]", block_size: int, num_tokens: int) -> None:
    """Append the hashes of the full blocks within the first `num_tokens` tokens that are not there yet."""
    sha256, view = hashlib.sha256, memoryview(token_ids)
    previous = hashes[-1] if hashes else seed
    for start in range(len(hashes) * block_size, num_tokens // block_size * block_size, block_size):
        previous = sha256(previous + view[start : start + block_size].tobytes()).digest()
        hashes.append(previous)
