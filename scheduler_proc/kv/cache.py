"""The KV cache as the planner sees it: what of a request is computed already, blocks for its next tokens, and their end.

A request's block table has a row for each block_size tokens and a column for each group: `request.blocks` holds it row by row, as it
goes to the workers. It only grows. What no token can see any more is given back to the pool while the request runs; its places in the
table stay, and mean nothing. Pure; owned by batching.py.
"""

from collections.abc import Sequence
from itertools import chain

from meshlm.protocol.ids import BlockId
from meshlm.protocol.kv import EncoderOnly, FullAttention, KVSpec, longest_request, pages_of
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.kv.groups import kinds_of
from meshlm.scheduler_proc.kv.pool import BlockPool
from meshlm.scheduler_proc.request import Request

FREED_AT_ONCE = (
    8  # blocks that a request which decodes gives back together: one by one costs the planner more than all the rest
)
_NO_BLOCK = BlockId(0)  # stands in a table where nobody looks


class KVCache:
    """Blocks of one rank. `specs`: of each group; none: one group that keeps all. `step_tokens`: that a step computes at most."""

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        specs: Sequence[KVSpec] = (),
        prefix_caching: bool = True,
        step_tokens: int = 1,
    ) -> None:
        self.block_size, self.prefix_caching = block_size, prefix_caching
        self.pool = BlockPool(num_pages)
        self._specs, self._step_tokens = specs or (FullAttention(),), step_tokens
        self._kinds = kinds_of(self._specs, block_size)
        self.num_groups = len(self._specs)
        self._matched: Request | None = None  # the last one
        self._freeing = [kind for kind in self._kinds if not kind.spec.keeps_all]
        self._keeps_none = all(isinstance(spec, EncoderOnly) for spec in self._specs)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, of block_size tokens in every group."""
        return self.pool.num_blocks // self.num_groups

    @property
    def free_blocks(self) -> int:
        return self.pool.num_free // self.num_groups

    def holds(self, num_tokens: int) -> bool:
        """Whether one request of `num_tokens` tokens fits."""
        return pages_of(self._specs, self.block_size, num_tokens, self._step_tokens) <= self.pool.num_blocks

    def longest(self, max_len: int) -> int:
        """The most tokens of one request that fit, below `max_len`."""
        return longest_request(self._specs, self.block_size, self.pool.num_blocks, max_len, self._step_tokens)

    def match(self, request: Request) -> int:
        """Give a request without blocks those of its longest cached prefix, less the last token: one at least is computed, to
        have logits. Returns how many tokens these hold."""
        if not (self.prefix_caching and request.work.reads_prefix_cache):
            return 0
        usable = len(request.tokens) - 1
        if not request.hashes:
            request.hashes = self._hashes_of_twin(request)
        hashes.extend(request.hashes, request.extra_keys, request.tokens, self.block_size, usable)
        self._matched = request
        found = request.hashes[: usable // self.block_size]
        at_most = -1
        while len(found) != at_most:  # until all kinds agree
            at_most = len(found)
            for kind in self._kinds:
                found = found[: kind.longest_hit(found, self.pool.find)]
        if found:
            self._take_cached(request, found)
        return len(found) * self.block_size

    def _hashes_of_twin(self, request: Request) -> list[bytes]:
        """The hashes of its prompt, where the request before had the same: a prompt with many choices is hashed once."""
        twin = self._matched
        if twin is None or twin.extra_keys != request.extra_keys:
            return []
        if twin.work.prompt_token_ids != request.work.prompt_token_ids:
            return []
        return twin.hashes[: request.num_prompt // self.block_size]

    def _take_cached(self, request: Request, found: list[bytes]) -> None:
        columns: list[list[Sequence[BlockId]]] = []  # by kind, then by row
        for kind in self._kinds:
            first = kind.first_needed(len(found) * self.block_size)
            cached = [pages for pages in map(self.pool.find, kind.keys(found[first:])) if pages]  # all: match saw them
            columns.append([(_NO_BLOCK,) * kind.width] * first + cached)
            request.num_freed.append(first)
        rows = chain.from_iterable(zip(*columns, strict=True)) if len(columns) > 1 else columns[0]
        request.blocks = list(chain.from_iterable(rows))
        request.num_cached_blocks = len(found)
        request.capacity = len(found) * self.block_size
        self.pool.touch(self._held(request))

    def grow(self, request: Request, num_tokens: int) -> list[BlockId] | None:
        """Blocks for its first `num_tokens` tokens: the rows that its table grows by. None when too few are free.

        What no token can see that is still to be computed is given back first, a few blocks at once, or all where memory is short.
        """
        blocks, pool, width = request.blocks, self.pool, self.num_groups
        if self._keeps_none:
            request.capacity = num_tokens
            return []
        if request.num_computed >= request.free_at and self._freeing:
            self._free_unseen(request)
        count = -(-num_tokens // self.block_size) * width - len(blocks)
        if count > pool.num_free:
            self._free_unseen(request)
            if count > pool.num_free:
                return None
        grown = pool.allocate(count)
        blocks += grown
        request.capacity = len(blocks) // width * self.block_size
        return grown

    def _free_unseen(self, request: Request) -> None:
        """Drafts may be refused and computed again, so only tokens that are known count as computed."""
        num_computed, width = min(request.num_computed, len(request.tokens) - 1), self.num_groups
        request.free_at = request.num_computed + FREED_AT_ONCE * self.block_size
        for kind in self._freeing:
            request.num_freed = num_freed = request.num_freed or [0] * len(self._kinds)
            first, freed = kind.first_needed(num_computed), num_freed[kind.number]
            if first > freed:
                num_freed[kind.number] = first
                for column in range(kind.begin, kind.end):
                    self.pool.free(request.blocks[freed * width + column : first * width : width])

    def free(self, request: Request) -> None:
        """It ends, or waits again."""
        self.pool.free(self._held(request))
        request.blocks = []
        request.num_freed = []
        request.capacity = request.num_cached_blocks = request.free_at = 0

    def _held(self, request: Request) -> list[BlockId]:
        """Its blocks that were not given back, in the order of its tokens."""
        if not any(request.num_freed):
            return request.blocks
        width, blocks = self.num_groups, request.blocks
        some = max(request.num_freed)
        held = [
            block
            for row in range(min(request.num_freed), some)
            for kind, freed in zip(self._kinds, request.num_freed, strict=True)
            if row >= freed
            for block in blocks[row * width + kind.begin : row * width + kind.end]
        ]
        return held + blocks[some * width :]

    def cache_full(self, request: Request, num_known: int) -> None:
        """Its first `num_known` tokens are known, and computed by the steps that were sent: others may use the blocks full of them."""
        if not self.prefix_caching:
            return
        full = num_known // self.block_size
        if full <= request.num_cached_blocks:
            return
        hashes.extend(request.hashes, request.extra_keys, request.tokens, self.block_size, num_known)
        width, blocks, num_freed = self.num_groups, request.blocks, request.num_freed
        cache_block = self.pool.cache_block
        for index in range(request.num_cached_blocks, full):
            block_hash, row = request.hashes[index], index * width
            for kind in self._kinds:
                if num_freed and index < num_freed[kind.number]:
                    continue
                key, first = kind.key(block_hash) if kind.number else block_hash, row + kind.begin
                cache_block(key, (blocks[first],) if kind.width == 1 else blocks[first : row + kind.end])
        request.num_cached_blocks = full

    def reset_prefix_cache(self, running: Sequence[Request]) -> None:
        """No block's content can be trusted any more, nor what these requests hold."""
        self.pool.reset_prefix_cache()
        for request in running:
            request.num_cached_blocks = len(request.blocks) // self.num_groups

    def check(self, running: Sequence[Request]) -> None:
        """AssertionError when the state contradicts itself."""
        self.pool.check([self._held(request) for request in running])
        for request in running:
            assert self._keeps_none or request.capacity == len(request.blocks) // self.num_groups * self.block_size
            for kind, freed in zip(self._kinds, request.num_freed, strict=False):
                assert freed <= kind.first_needed(request.num_computed), "a block that is still seen was freed"
