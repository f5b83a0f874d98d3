"""The KV cache as the planner sees it: what of a request is computed already, blocks for its next tokens, and their end.

A request's block table has a row for each block_size tokens and a column for each group: `request.blocks` holds it row by row, as it
goes to the workers. It only grows. What no token can see any more is given back to the pool while the request runs; its places in the
table stay, and mean nothing. Pure; owned by batching.py.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import gcd, inf

from meshlm.protocol.edges.step import NO_LIMIT
from meshlm.protocol.kv import FullAttention, KVSpec, longest_request, pages_of
from meshlm.protocol.wire.ids import BlockId
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.kv.groups import Kind, kinds_of
from meshlm.scheduler_proc.kv.pool import BlockPool
from meshlm.scheduler_proc.kv.prefixes import Prefixes
from meshlm.scheduler_proc.request import Request

NEVER = 1 << 30  # blocks: of a request whose blocks are not cached any more
# blocks that a request which decodes gives back together: one by one costs the planner more than all the rest
FREED_AT_ONCE = 8
MOST_AT_ONCE = 128  # tokens of these; a block of more is given back alone
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
        self.block_size = block_size
        self.prefix_caching = prefix_caching and all(spec.shares_prefix for spec in specs)
        self.pool = BlockPool(num_pages)
        self._specs, self._step_tokens = specs or (FullAttention(),), step_tokens
        self._kinds = kinds_of(self._specs, block_size)
        self.prefixes = Prefixes(self._kinds, self.pool, block_size)
        self.num_groups = len(self._specs)
        self._matched: Request | None = None  # the last one
        self._best = 0  # blocks of it that one kind at least had cached
        self.limited: dict[str, int] = {}  # tokens of it that other kinds had, by the name of the kind that had not
        self._freeing = [kind for kind in self._kinds if not kind.spec.keeps_all]
        self._freed_at_once = min(FREED_AT_ONCE * block_size, max(block_size, MOST_AT_ONCE))
        self._carried = [kind for kind in self._kinds if kind.carried]
        self._paged = [kind for kind in self._kinds if not kind.carried]  # each block has a page of its own
        self._row_pages = sum(kind.width for kind in self._paged)
        self._every = gcd(*(kind.every for kind in self._carried))  # no row but its multiples has a page of its own
        # Checkpoints of the step that is being planned: the request, the kind, the row and its pages.
        self._sending: list[tuple[Request, Kind, int, Sequence[BlockId]]] = []
        # Gives back pages that are kept for a waiting request, but not for this one; False: there are none.
        self.spare: Callable[[Request], bool] | None = None
        self._keeps_none = not pages_of(self._specs, block_size, block_size)

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

    def side_by_side(self, num_tokens: int) -> float:
        """How many requests of so many tokens, all decoding, fill the cache; infinite where they hold nothing of it."""
        held = pages_of(self._specs, self.block_size, num_tokens)
        return self.pool.num_blocks / held if held else inf

    def longest(self, max_len: int) -> int:
        """The most tokens of one request that fit, below `max_len`."""
        return longest_request(self._specs, self.block_size, self.pool.num_blocks, max_len, self._step_tokens)

    def match(self, request: Request) -> int:
        """Give a request without blocks those of its longest cached prefix, less the last token: one at least is computed, to
        have logits. Returns how many tokens these hold."""
        self.limited = {}
        if not (self.prefix_caching and request.work.reads_prefix_cache):
            return 0
        found = self._longest_hit(self.usable_hashes(request))
        if found:
            self._take_cached(request, found)
        return len(found) * self.block_size

    def usable_hashes(self, request: Request) -> list[bytes]:
        """The hashes of the blocks of which a request may use what is cached."""
        usable = len(request.tokens) - 1
        if not request.hashes:
            request.hashes = self._hashes_of_twin(request)
        hashes.extend(request.hashes, request.extra_keys, request.tokens, self.block_size, usable)
        self._matched = request
        return request.hashes[: usable // self.block_size]

    def _longest_hit(self, found: list[bytes]) -> list[bytes]:
        """The leading blocks of these that all kinds can serve."""
        hits = [kind.longest_hit(found, self.pool.find) for kind in self._kinds]
        self._best, found, at_most = max(hits), found[: min(hits)], -1
        if len(found) < self._best:
            short = [(kind.name, self._best - hit) for kind, hit in zip(self._kinds, hits, strict=True)]
            self.limited = {name: count * self.block_size for name, count in short if count}
        while len(found) != at_most:  # until all kinds agree
            at_most = len(found)
            for kind in self._kinds:
                found = found[: kind.longest_hit(found, self.pool.find)]
        return found

    def step_end(self, start: int, count: int) -> int:
        """So many of the `count` tokens of a prompt from `start` on that their step ends where a checkpoint is left, if there is such
        a place among them; else all of them."""
        if not self.prefix_caching:
            return count
        return min((kind.spec.step_end(self.block_size, start, count) for kind in self._carried), default=count)

    def drafts_end(self, request: Request) -> int:
        """Of the request's tokens so many may be computed, with drafts, before its next step: a checkpoint that is due is left."""
        ends = [kind.spec.drafts_end(self.block_size, request.num_computed) for kind in self._carried]
        return max(request.capacity, min([end for end in ends if end is not None], default=NO_LIMIT))

    def missed(self, request: Request) -> dict[str, int]:
        """Tokens of this request, the last one that was matched, that were not found, by reason; without those that nobody has seen."""
        if not (self.prefix_caching and request.work.reads_prefix_cache):
            return {"disabled": len(request.tokens)}
        full = (len(request.tokens) - 1) // self.block_size
        beyond = request.hashes[self._best : full]
        blocks = {
            "kv_group": self._best - request.num_cached_blocks,
            "evicted": self.pool.num_evicted(beyond) if beyond else 0,
        }
        tokens = {reason: count * self.block_size for reason, count in blocks.items() if count}
        return {**tokens, "last_block": len(request.tokens) - full * self.block_size}

    def usage(self, running: Sequence[Request]) -> tuple[dict[str, float], float]:
        """Pages that these requests hold, by group (a shared one counts for each), and the share of places without a token."""
        held = {kind.name: 0.0 for kind in self._kinds}
        places = tokens = 0
        for request in running:
            rows, num_freed = len(request.blocks) // self.num_groups, request.num_freed or [0] * len(self._kinds)
            for kind, freed in zip(self._kinds, num_freed, strict=True):
                if kind.carried:  # a page may have several places
                    columns = range(kind.begin, kind.end)
                    pages = {
                        page
                        for at in columns
                        for page in request.blocks[freed * self.num_groups + at :: self.num_groups]
                    }
                    held[kind.name] += len(pages)
                else:
                    held[kind.name] += (rows - freed) * kind.width
            places += request.capacity
            tokens += min(len(request.tokens), request.capacity)
        return held, 1 - tokens / places if places else 0.0

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
        if self.pool.has_untold():
            self._tell_stored(request, 0, len(found))

    def _tell_stored(self, request: Request, begin: int, end: int) -> None:
        """To those who follow the events: which of these blocks the cache has."""
        events, find = self.pool.events, self.pool.find
        assert events is not None
        for kind in self._kinds:
            for index in range(begin, end):
                if find(kind.key(request.hashes[index])):
                    events.stored(kind, request, index, self.block_size)

    def grow(self, request: Request, num_tokens: int, others: Iterable[Request] = ()) -> list[BlockId] | None:
        """Blocks for its first `num_tokens` tokens: the rows that its table grows by. None when too few are free.

        What no token can see that is still to be computed is given back first, a few blocks at once, or all where memory is short; then
        the others do so, too. None of these has tokens of a prompt in the step that is being planned, which see more than those behind.
        """
        blocks, pool, width = request.blocks, self.pool, self.num_groups
        if self._keeps_none:
            request.capacity = num_tokens
            return []
        if request.num_computed >= request.free_at and self._freeing:
            self._free_unseen(request)
        if self._carried:
            return self._grow_carrying(request, num_tokens, others)
        count = -(-num_tokens // self.block_size) * width - len(blocks)
        if count > pool.num_free and not self._makes_room(count, request, others):
            return None
        grown = pool.allocate(count)
        blocks += grown
        request.capacity = len(blocks) // width * self.block_size
        return grown

    def _grow_carrying(self, request: Request, num_tokens: int, others: Iterable[Request]) -> list[BlockId] | None:
        """`grow` where some groups carry a page on: it gets further places in their tables, unless what it holds is to be left."""
        blocks, pool, width = request.blocks, self.pool, self.num_groups
        begin, end = len(blocks) // width, -(-num_tokens // self.block_size)
        if end <= begin:
            return []
        if end - begin == 1 and begin % self._every and self._row_pages <= pool.num_free:
            # As almost all that decode: every state goes on, at its place beside new pages.
            grown, last = pool.allocate(self._row_pages), len(blocks) - width
            for kind in self._carried:
                grown[kind.begin : kind.begin] = blocks[last + kind.begin : last + kind.end]
            blocks += grown
            request.capacity = end * self.block_size
            return grown
        computed = request.num_computed or request.capacity  # one that begins has what was found in the cache
        fresh = [kind.spec.fresh_rows(self.block_size, begin, end, computed) for kind in self._kinds]
        count = sum(kind.width * len(rows) for kind, rows in zip(self._kinds, fresh, strict=True))
        if count > pool.num_free and not self._makes_room(count, request, others):
            return None
        pages = iter(pool.allocate(count))
        for row in range(begin, end):
            for kind, rows in zip(self._kinds, fresh, strict=True):
                before = len(blocks) - width
                blocks += (next(pages) if row in rows else blocks[before + n] for n in range(kind.width))
        request.capacity = end * self.block_size
        return blocks[begin * width :]

    def _makes_room(self, count: int, request: Request, others: Iterable[Request]) -> bool:
        """Whether so many pages are free once this request, and if need be the others, gave back what they cannot see."""
        self._free_unseen(request)
        if count > self.pool.num_free and self._freeing:
            latest = self._freed_at_once - self.block_size  # a block at least was computed since they last gave back
            for other in [one for one in others if one.free_at - one.num_computed <= latest]:
                self._free_unseen(other)
        while count > self.pool.num_free and self.spare is not None and self.spare(request):
            pass
        return count <= self.pool.num_free

    def _free_unseen(self, request: Request) -> None:
        """Drafts may be refused and computed again, so only tokens that are known count as computed."""
        num_computed, width = min(request.num_computed, len(request.tokens) - 1), self.num_groups
        request.free_at = request.num_computed + self._freed_at_once
        for kind in self._freeing:
            request.num_freed = num_freed = request.num_freed or [0] * len(self._kinds)
            first, freed = kind.first_needed(num_computed), num_freed[kind.number]
            if first > freed:
                num_freed[kind.number] = first
                for column in range(kind.begin, kind.end):
                    pages = request.blocks[freed * width + column : first * width : width]
                    if kind.carried:  # it may be carried on to what is still seen
                        pages = [
                            page for page in dict.fromkeys(pages) if page != request.blocks[first * width + column]
                        ]
                    self.pool.free(pages)

    def free(self, request: Request) -> None:
        if self._sending:
            self._sending = [one for one in self._sending if one[0] is not request]
        self.pool.free(self._held(request))
        request.blocks = []
        request.num_freed = []
        request.capacity = request.num_cached_blocks = request.free_at = 0

    def _held(self, request: Request) -> list[BlockId]:
        """Its blocks that were not given back, in the order of its tokens."""
        if self._carried:
            return self._held_carrying(request)
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

    def _held_carrying(self, request: Request) -> list[BlockId]:
        """The same, where a page may have several places."""
        width, blocks = self.num_groups, request.blocks
        rows = range(min(request.num_freed, default=0), len(blocks) // width)
        freed = request.num_freed or [0] * len(self._kinds)
        held = (
            block
            for row in rows
            for kind in self._kinds
            if row >= freed[kind.number]
            for block in blocks[row * width + kind.begin : row * width + kind.end]
        )
        return list(dict.fromkeys(held))

    def cache_full(self, request: Request, num_known: int, *, sent: bool = True) -> None:
        """Its first `num_known` tokens are known, and computed by the steps that were sent: others may use the blocks full of them.

        sent: False while the step that computes some of them is being planned. Another request of that step may use its keys and
        values, which a layer writes before it reads any, but not the state that it leaves."""
        if not self.prefix_caching:
            return
        full = num_known // self.block_size
        if full <= request.num_cached_blocks:
            return
        hashes.extend(request.hashes, request.extra_keys, request.tokens, self.block_size, num_known)
        width, blocks, num_freed = self.num_groups, request.blocks, request.num_freed
        cache_block, known = self.pool.cache_block, request.num_cached_blocks
        for index in range(known, full):
            block_hash, row = request.hashes[index], index * width
            for kind in self._paged:
                if num_freed and index < num_freed[kind.number]:
                    continue
                key, first = kind.key(block_hash) if kind.number else block_hash, row + kind.begin
                cache_block(key, (blocks[first],) if kind.width == 1 else blocks[first : row + kind.end])
        if self._carried and full // self._every > known // self._every:
            self._leave(request, known, full)
        request.num_cached_blocks = full
        if self.pool.events is not None:
            self._tell_stored(request, known, full)
        if sent and self._sending:
            self._sent()

    def forget(self, request: Request, position: int) -> set[BlockId]:
        """What was computed of the request from this token on is wrong: nobody finds it any more. Gives the pages that had it."""
        keys = (kind.key(one) for one in request.hashes[position // self.block_size :] for kind in self._kinds)
        return {page for key in list(keys) for page in self.pool.forget(key)}

    def _leave(self, request: Request, begin: int, end: int) -> None:
        """Checkpoints behind its blocks from `begin` up to `end` go to the pool with the step that computes them."""
        width, blocks, num_freed = self.num_groups, request.blocks, request.num_freed
        for kind in self._carried:
            for index in kind.places(max(begin, num_freed[kind.number]) if num_freed else begin, end):
                first = index * width + kind.begin
                if kind.is_left(blocks[first : first + width + 1 : width]):
                    self._sending.append((request, kind, index, blocks[first : first + kind.width]))

    def _sent(self) -> None:
        for request, kind, index, pages in self._sending:
            self.pool.cache_block(kind.key(request.hashes[index]), pages)
            if self.pool.events is not None:
                self._tell_stored(request, index, index + 1)
        self._sending.clear()

    def take_changes(self) -> tuple[bytes, bytes, bytes]:
        """See BlockPool.take_changes; the plan that takes them is complete."""
        self._sent()
        return self.pool.take_changes()

    def reset_prefix_cache(self, running: Sequence[Request]) -> None:
        """No block's content can be trusted any more, nor what these requests hold and what they compute with it."""
        self._sending.clear()
        self.pool.reset_prefix_cache()
        for request in running:
            request.num_cached_blocks = NEVER

    def tell_cleared(self) -> None:
        """To those who follow the events: what the workers held is gone, or cannot be reached. A later session says what is left."""
        if self.pool.events is not None:
            self.pool.events.cleared()

    def check(self, running: Sequence[Request]) -> None:
        """AssertionError when the state contradicts itself."""
        self.pool.check([self._held(request) for request in running])
        for request in running:
            assert self._keeps_none or request.capacity == len(request.blocks) // self.num_groups * self.block_size
            for kind, freed in zip(self._kinds, request.num_freed, strict=False):
                assert freed <= kind.first_needed(request.num_computed), "a block that is still seen was freed"
