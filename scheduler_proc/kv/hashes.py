"""Keys of blocks: a sha256 chain over full blocks of token ids, each with what else decides its KV contents."""

import hashlib
from array import array
from typing import NamedTuple

from meshlm.protocol.extras import Extras, key_parts
from meshlm.protocol.wire.parts import joined

_ROOT = bytes(hashlib.sha256().digest_size)  # the parent of a first block


class ExtraKeys(NamedTuple):
    """What beside the tokens decides the contents of blocks (protocol/extras.py)."""

    cache_salt: str = ""
    extras: Extras = ()
    weights: bytes = b""  # WeightsVersion.key

    def key(self, index: int, block_size: int) -> bytes:
        """The key of block number `index`; empty where nothing but its tokens counts."""
        own = key_parts(self.cache_salt, self.extras, index * block_size, (index + 1) * block_size)
        return joined(b"weights", self.weights, own) if self.weights and not index else own


def extend(hashes: list[bytes], extra: ExtraKeys, token_ids: "array[int]", block_size: int, num_tokens: int) -> None:
    """Append the hashes of the full blocks within the first `num_tokens` tokens that are not there yet."""
    sha256, size = hashlib.sha256, block_size * token_ids.itemsize
    first = len(hashes)
    previous = hashes[-1] if hashes else _ROOT
    new = memoryview(token_ids)[first * block_size : num_tokens // block_size * block_size].tobytes()
    contents = [new[start : start + size] for start in range(0, len(new), size)]
    if contents and (extra.extras or not first):
        last = len(contents) if extra.extras else 1
        contents[:last] = [content + extra.key(first + nth, block_size) for nth, content in enumerate(contents[:last])]
    for content in contents:
        previous = sha256(previous + content).digest()
        hashes.append(previous)
