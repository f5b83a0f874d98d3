"""An index of prompts' chunks by rank: the prefixes that each rank has computed, as far as the coordinator can know.

Owned by routing.py. A rank's real prefix cache is its scheduler's; this is a guess at it, good enough to choose a rank: a dispatch adds
the prompt at once, a least-recently-used limit of the size of the rank's KV cache imitates its evictions, and what the
scheduler says of a request's real hits takes back what was guessed wrong. It never sees output tokens.

Prompts are cut coarser than KV blocks are, and coarser still after 1,024 tokens, so that 2,000 tokens cost 20 look-ups. The chain
is of Python's own hash of bytes: 64 bits, with a secret key of this process, so nobody can make prompts that collide; and if two
did, a request would meet a colder cache.
"""

from collections import OrderedDict

from meshlm.protocol.extras import Extras, key_parts, with_keys

FINE_TOKENS, COARSE_TOKENS, FINE_UNTIL = 64, 256, 1024
_FINE = FINE_UNTIL // FINE_TOKENS
_SIZES = (FINE_TOKENS, COARSE_TOKENS)
MAX_CHUNKS = 1 << 20  # of all ranks together: about 300 MB when all differ

Chain = list[int]
Found = list[tuple[int, int]]  # (tokens, bit mask of the ranks whose longest known prefix has that many), longest first


def chain_of(prompt: bytes, salt: str, extras: Extras = ()) -> Chain:
    """One hash per full chunk of a prompt of int32 ids; each covers all before it, the salt, and what else decides the KV of both."""
    chain: Chain = []
    keyed = with_keys(extras)
    previous = hash(salt)
    at, end = 4 * FINE_TOKENS, len(prompt)
    begin, fine_until = 0, 4 * FINE_UNTIL
    while at <= end:
        keys = key_parts("", keyed, begin // 4, at // 4) if keyed else b""
        previous = hash((previous, prompt[begin:at], keys) if keys else (previous, prompt[begin:at]))
        chain.append(previous)
        begin = at
        at += 4 * (FINE_TOKENS if at < fine_until else COARSE_TOKENS)
    return chain


def tokens_at(depth: int) -> int:
    """Tokens that the first `depth` chunks hold."""
    return depth * FINE_TOKENS if depth <= _FINE else FINE_UNTIL + (depth - _FINE) * COARSE_TOKENS


class PrefixIndex:
    """Ranks are named by their number."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # chunk -> bit mask of ranks
        # rank -> chunk -> twice the time of its last use, plus 1 if it is a coarse one; oldest first
        self._chunks: dict[int, OrderedDict[int, int]] = {}
        self._tokens: dict[int, int] = {}  # rank -> tokens in its chunks

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def find(self, chain: Chain) -> Found:
        """The ranks that know a prefix of this prompt, and how much of it."""
        found: Found = []
        known = self._ranks
        before = -1
        for depth, chunk in enumerate(chain):
            ranks = known.get(chunk, 0) & before
            if ranks != before:
                if depth:
                    found.append((tokens_at(depth), before & ~ranks))
                if not ranks:
                    break
            before = ranks
        else:
            if chain:
                found.append((tokens_at(len(chain)), before))
        found.reverse()
        return found

    def last_use(self, rank: int, chain: Chain, tokens: int) -> int:
        """The time when the last chunk of the first `tokens` tokens was used before; 0 for never."""
        chunks = self._chunks.get(rank)
        depth = tokens // FINE_TOKENS if tokens <= FINE_UNTIL else (tokens - FINE_UNTIL) // COARSE_TOKENS + _FINE
        return chunks.get(chain[depth - 1], 0) >> 1 if chunks and depth else 0

    def add(self, rank: int, chain: Chain, now: int, max_tokens: int, max_chunks: int) -> None:
        """The rank will compute this prompt. So much is remembered of it at most."""
        chunks = self._chunks.get(rank)
        if chunks is None:
            chunks = self._chunks[rank] = OrderedDict()
        known, bit, new = self._ranks, 1 << rank, 0
        value = 2 * now + (len(chain) > _FINE)
        # From its end: the beginning outlives its continuations, as in the scheduler.
        for depth in range(len(chain) - 1, -1, -1):
            if depth == _FINE - 1:
                value = 2 * now
            chunk = chain[depth]
            if chunk in chunks:
                chunks.move_to_end(chunk)
            else:
                known[chunk] = known.get(chunk, 0) | bit
                new += _SIZES[value & 1]
            chunks[chunk] = value
        self._tokens[rank] = self._tokens.get(rank, 0) + new
        while self._tokens[rank] > max_tokens or len(chunks) > max_chunks:
            self._drop(rank, chunks)

    def forget(self, rank: int, before: int | None = None) -> None:
        """The rank's cache is empty; or: what it has not used since `before` is gone."""
        chunks = self._chunks.get(rank)
        if chunks is None:
            return
        while chunks and (before is None or next(iter(chunks.values())) < 2 * before):
            self._drop(rank, chunks)
        if not chunks:
            del self._chunks[rank], self._tokens[rank]

    def _drop(self, rank: int, chunks: "OrderedDict[int, int]") -> None:
        chunk, value = chunks.popitem(last=False)
        self._tokens[rank] -= _SIZES[value & 1]
        left = self._ranks[chunk] & ~(1 << rank)
        if left:
            self._ranks[chunk] = left
        else:
            del self._ranks[chunk]

    def check(self) -> None:
        masks: dict[int, int] = {}
        for rank, chunks in self._chunks.items():
            times = [value >> 1 for value in chunks.values()]
            assert times == sorted(times), "not in the order of use"
            assert self._tokens[rank] == sum(_SIZES[value & 1] for value in chunks.values()), "tokens are miscounted"
            for chunk in chunks:
                masks[chunk] = masks.get(chunk, 0) | 1 << rank
        assert masks == self._ranks, "the index and the ranks' tables disagree"
