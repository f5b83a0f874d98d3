"""The prefix cache's changes as events, for routers that choose a rank by them (--kv-events-config). Pure.

Owned by cache.py and pool.py, which tell of each change; core.py hands on what `take` gives. Blocks are named once their tokens are
known. An heir of workers that kept their pages knows keys alone: it tells of such a block when a request comes that has its tokens. So
whoever follows the events never believes more than is there.
"""

from collections.abc import Container

from meshlm.protocol.extras import key_parts, slot_name
from meshlm.protocol.kv_events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_of
from meshlm.scheduler_proc.kv.groups import Kind
from meshlm.scheduler_proc.request import Request


class CacheEvents:
    """`told`: the group of each key that subscribers know of."""

    def __init__(self) -> None:
        self.told: dict[bytes, int] = {}
        self._events: list[KVEvent] = [AllBlocksCleared()]  # whoever was here before left nothing that is known

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored(self, kind: Kind, request: Request, index: int, block_size: int) -> None:
        """The cache has block number `index` of the request, in this kind's groups."""
        key = kind.key(request.hashes[index])
        if key in self.told:
            return
        self.told[key] = kind.number
        parent = hash_of(request.hashes[index - 1]) if index else None
        tokens = request.tokens[index * block_size : (index + 1) * block_size].tolist()
        extra = _extra_keys(request, index, block_size)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group_idx == kind.number and last.block_hashes[-1] == parent:
            assert last.extra_keys is not None
            last.block_hashes.append(hash_of(key))
            last.token_ids += tokens
            last.extra_keys.append(extra)
            return
        self._events.append(
            BlockStored(
                [hash_of(key)],
                parent,
                tokens,
                block_size,
                None,
                DEVICE,
                slot_name(request.work.extras),
                [extra],
                kind.number,
                kind.spec.event_kind,
                getattr(kind.spec, "window", None),
            )
        )

    def removed(self, key: bytes) -> None:
        """The cache has this block no longer."""
        group = self.told.pop(key, None)
        if group is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(hash_of(key))
        else:
            self._events.append(BlockRemoved([hash_of(key)], DEVICE, group))

    def cleared(self) -> None:
        """The cache has no block any more. What was not taken yet is of no interest then."""
        if self.told or self._events:
            self.told.clear()
            self._events = [AllBlocksCleared()]

    def inherited(self, cached: Container[bytes]) -> None:
        """Workers begin a new session, in which the cache has these keys."""
        gone = [key for key in self.told if key not in cached]
        if gone and len(gone) == len(self.told):
            self.cleared()
            return
        for key in gone:
            self.removed(key)


def _extra_keys(request: Request, index: int, block_size: int) -> tuple[str | bytes, ...] | None:
    """What beside its tokens decides the block: the salt of a first one, and what extras say of its tokens."""
    salt, extras, _ = request.extra_keys
    if not (extras or (salt and not index)):
        return None
    of_extras = key_parts("", extras, index * block_size, (index + 1) * block_size)
    return (*((salt,) if salt and not index else ()), *((of_extras,) if of_extras else ())) or None
