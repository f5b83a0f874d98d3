"""A worker of which all memory knows what was written there.

A slot of memory holds what its token's keys and values are made of: the group, the version of the weights, the salt and all tokens so
far. A worker that computes a token looks at all that the token sees; a copy takes a page at a time, between any other events.
"""

from collections import deque
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kv_device import BLOCK

from meshlm.protocol.edges.kv import (
    KEY_BYTES,
    NOT_HERE,
    FindPages,
    LeavePages,
    MovePages,
    PageMemory,
    PagesFound,
    PagesMoved,
)
from meshlm.protocol.edges.step import Reset, StepPlan, StepResult, WorkerReady
from meshlm.protocol.kv import ChunkedAttention, RecurrentState, SlidingWindow
from meshlm.protocol.operations import CallWorkers, Operation, OperationDone
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.workers.kv.mirror import PrefixCacheMirror

if TYPE_CHECKING:
    from page_world import World

Slots = dict[int, list[object]]  # page -> what each of its slots holds


def next_token(tokens: list[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(tokens)) % 3


class Copy:
    """One MovePages of one worker, under way."""

    def __init__(self, move: MovePages) -> None:
        self.move, self.at = move, 0
        self.failed: list[int] = []
        self.pages, self.there = ints(move.pages), ints(move.there)


class Worker:
    """Memory of a device, and rows."""

    def __init__(self, world: "World", identity: Identity, incarnation: int) -> None:
        self.world, self.identity, self.incarnation = world, identity, Incarnation(incarnation)
        self.pages: Slots = {page: [None] * BLOCK for page in range(world.num_pages)}
        self.path = f"{identity} {incarnation}"
        world.memory[self.path] = self.pages
        self.rows: dict[int, tuple[list[int], list[int], str]] = {}  # tokens, blocks, salt
        self.mirror = PrefixCacheMirror()
        self.inbox: deque[Any] = deque()
        self.copies: list[Copy] = []
        self.names: dict[int, bytes] = {}  # its namespace when a copy was begun, by number
        self.session = 0
        self.weights = WeightsVersion()
        self.done: dict[str, WeightsVersion] = {}
        self.left: list[LeavePages] = []

    @property
    def version(self) -> bytes:
        """Of what its pages hold: its namespace."""
        return sha256(self.weights.key).digest()[:16] if self.weights.key else b"v" * 16

    def ready(self) -> WorkerReady:
        world = self.world
        memory = PageMemory(self.path, world.num_pages, ())
        facts = (self.session, world.num_pages, BLOCK, 8, 16, 3, *self.mirror.columns())
        server = ("h", 100 + self.identity.index) if world.config.transfer is not None else None
        told: dict[str, Any] = {"page_bytes": 64, "namespace": self.version, "pages": memory, "page_server": server}
        told["weights"] = self.weights
        return WorkerReady(*facts, kv_specs=world.specs, **told)

    def take(self, message: Any) -> list[Any]:
        """Its answers."""
        match message:
            case Reset():
                self.copies.clear()
                self.rows.clear()
                self.session = message.session
                self.weights = message.weights or self.weights
                return [self.ready()]
            case StepPlan():
                return [self.run(message)]
            case MovePages():
                if message.is_load:
                    self.mirror.forget(ints(message.pages))
                self.copies.append(Copy(message))
                self.names[message.number] = self.version
            case FindPages():
                return [self.find(message)]
            case LeavePages():
                self.left.append(message)
            case Operation():
                self.mirror.reset_prefix_cache()
                if not isinstance(message.action, CallWorkers):
                    return [OperationDone(message.id)]
                if self.done.get(message.id) != self.weights:  # as the real one: it has lost what the call changed
                    self.weights = self.done[message.id] = self.weights.after_call(message.id)
                return [OperationDone(message.id, weights=self.done[message.id])]
        return []

    def find(self, asked: FindPages) -> PagesFound:
        pages: list[int] = []
        for nth, width in enumerate(asked.widths):
            key = asked.keys[nth * KEY_BYTES : (nth + 1) * KEY_BYTES]
            has = all((asked.namespace, key, place) in self.shelf for place in range(width))
            pages += [0 if has else NOT_HERE] * width
        return PagesFound(asked.number, pack_i32(pages), session=asked.session)

    @property
    def shelf(self) -> dict[Any, list[object]]:
        return self.world.shelves[self.identity.index % self.world.num_workers]

    def copy(self, *, fails: bool = False) -> list[PagesMoved]:
        """The next page of its oldest copy."""
        copy = self.copies[0]
        move, at, page = copy.move, copy.at, copy.pages[copy.at]
        if fails or self.world.now * 1e9 > move.deadline_ns > 0:
            copy.failed.append(at)
        elif move.memory is None:
            width_at = len([key for key in self._keys(move)[:at] if key == self._keys(move)[at]])
            place = (self.names[move.number], self._keys(move)[at], width_at)
            if move.is_load:
                self.pages[page][:] = self.shelf[place]
            else:
                self.shelf[place] = list(self.pages[page])
        else:
            other = self.world.memory[move.memory.path][copy.there[at]]
            source, target = (other, self.pages[page]) if move.is_load else (self.pages[page], other)
            target[:] = source
        copy.at += 1
        if copy.at < len(copy.pages):
            return []
        self.copies.pop(0)
        message = "it failed" if copy.failed else ""
        return [PagesMoved(move.session, move.number, pack_i32(copy.failed), 64 * copy.at, 1000, message)]

    def _keys(self, move: MovePages) -> list[bytes]:
        return [move.keys[at : at + KEY_BYTES] for at in range(0, len(move.keys), KEY_BYTES)]

    # --- steps ---

    def run(self, plan: StepPlan) -> StepResult:
        self.mirror.apply(plan)
        width = len(self.world.specs)
        for row in ints(plan.removed_rows):
            del self.rows[row]
        for new in plan.new_rows:
            self.rows[new.row] = (
                ints(new.token_ids),
                ints(new.block_ids),
                self.world.salts[plan.session, plan.step, new.row],
            )
        grown = ints(plan.block_ids)
        for nth, row in enumerate(ints(plan.block_rows)):
            self.rows[row][1].extend(grown[nth * width : (nth + 1) * width])
        rows, starts = ints(plan.rows), ints(plan.starts)
        counts = ints(plan.counts) or [1] * len(rows)
        samples = plan.samples or b"\x01" * len(rows)
        batch = list(zip(rows, starts, counts, strict=True))
        for row, start, _ in batch:
            self._goes_on(row, start)
        for row, start, count in sorted(batch, key=lambda one: one[1]):
            self._write(row, start, count)
        for row, start, count in batch:
            self._sees(row, start)
            self._sees(row, start + count - 1)
        tokens = []
        for row, sampled in zip(rows, samples, strict=True):
            if sampled:
                known = self.rows[row][0]
                known.append(next_token(known))
                tokens.append(known[-1])
        return StepResult(plan.session, plan.step, pack_i32(tokens), done_ns=1)

    def _slot(self, row: int, group: int, position: int) -> tuple[list[object], int]:
        blocks = self.rows[row][1]
        return self.pages[blocks[position // BLOCK * len(self.world.specs) + group]], position % BLOCK

    def _content(self, row: int, group: int, position: int) -> object:
        tokens, _, salt = self.rows[row]
        return (group, self.version, salt, tuple(tokens[: position + 1]))

    def _write(self, row: int, start: int, count: int) -> None:
        for position in range(start, start + count):
            for group in range(len(self.world.specs)):
                page, at = self._slot(row, group, position)
                page[at] = self._content(row, group, position)

    def _goes_on(self, row: int, start: int) -> None:
        for group, spec in enumerate(self.world.specs):
            if isinstance(spec, RecurrentState) and start:
                page, at = self._slot(row, group, start - 1)
                assert page[at] == self._content(row, group, start - 1), "a wrong state"

    def _sees(self, row: int, position: int) -> None:
        for group, spec in enumerate(self.world.specs):
            if isinstance(spec, RecurrentState):
                continue
            first = max(0, position - spec.window + 1) if isinstance(spec, SlidingWindow) else 0
            first = position // spec.chunk * spec.chunk if isinstance(spec, ChunkedAttention) else first
            for key in range(first, position):
                page, at = self._slot(row, group, key)
                assert page[at] == self._content(row, group, key), f"{spec}: {position} sees a wrong {key}"
