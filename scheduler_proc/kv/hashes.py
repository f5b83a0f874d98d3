"""Keys of blocks: a sha256 chain over full blocks of token ids, each with what else decides its KV contents."""

import hashlib
from array import array

_ROOT = bytes(hashlib.sha256().digest_size)  # the parent of a first block


def extra_keys(cache_salt: str) -> dict[int, bytes]:
    """Keys that beside the tokens decide the contents of a block, by its index. Requests with different salts share no block."""
    return {0: b"salt\0" + cache_salt.encode()} if cache_salt else {}


def extend(
    hashes: list[bytes], extra: dict[int, bytes], token_ids: "array[int]", block_size: int, num_tokens: int
) -> None:
    """Append the hashes of the full blocks within the first `num_tokens` tokens that are not there yet."""
    sha256, size = hashlib.sha256, block_size * token_ids.itemsize
    first = len(hashes)
    previous = hashes[-1] if hashes else _ROOT
    new = memoryview(token_ids)[first * block_size : num_tokens // block_size * block_size].tobytes()
    contents = [new[start : start + size] for start in range(0, len(new), size)]
    for index, key in extra.items():
        if first <= index < first + len(contents):
            contents[index - first] += key
    for content in contents:
        previous = sha256(previous + content).digest()
        hashes.append(previous)
