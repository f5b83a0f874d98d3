"""A worker whose next token is a function of the KV contents it was really given. Slots hold a rolling hash of the tokens before."""

from collections.abc import Iterable

from msgspec import Struct
from network import running

from meshlm.protocol.columns import ints, pack_i32
from meshlm.protocol.ids import Identity, Incarnation, Role
from meshlm.protocol.step_edge import Reset, StepPlan, StepResult, WorkerReady
from meshlm.runtime.errors import LinkDown
from meshlm.runtime.mesh import Mesh
from meshlm.workers.directory import Directory

VOCAB = 96
RESET_S = 0.3  # at most


def next_token(state: int) -> int:
    return (state >> 7) % VOCAB


def extended(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % (1 << 61)


def reference(prompt: Iterable[int], num_tokens: int) -> list[int]:
    """What an undisturbed run generates."""
    state = 0
    for token in prompt:
        state = extended(state, token)
    found: list[int] = []
    while len(found) < num_tokens:
        found.append(next_token(state))
        state = extended(state, found[-1])
    return found


class Model:
    """Rows and KV slots of one device."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.slots = [0] * (num_blocks * block_size)
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # tokens, blocks

    def slot(self, row: int, position: int) -> int:
        return self.rows[row][1][position // self.block_size] * self.block_size + position % self.block_size

    def run(self, plan: StepPlan) -> list[int]:
        """The sampled tokens."""
        for row in ints(plan.removed_rows):
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row given away twice"
            self.rows[new.row] = (ints(new.token_ids), ints(new.block_ids))
        for row, block in zip(ints(plan.block_rows), ints(plan.block_ids), strict=True):
            self.rows[row][1].append(block)
        rows, starts = ints(plan.rows), ints(plan.starts)
        counts = ints(plan.counts) or [1] * len(rows)
        assert sum(counts) == plan.num_tokens
        # A layer writes all keys before it reads any, so a prefix may be shared within one step: in order of position.
        for start, row, count in sorted(zip(starts, rows, counts, strict=True)):
            for position in range(start, start + count):
                before = self.slots[self.slot(row, position - 1)] if position else 0
                self.slots[self.slot(row, position)] = extended(before, self.rows[row][0][position])
        tokens: list[int] = []
        for row, start, count, sampled in zip(rows, starts, counts, plan.samples or b"\x01" * len(rows), strict=True):
            if sampled:
                assert len(self.rows[row][0]) == start + count, "sampled away from the row's end"
                tokens.append(next_token(self.slots[self.slot(row, start + count - 1)]))
                self.rows[row][0].append(tokens[-1])
        return tokens


class MockWorker:
    """In the place of workers/io.py: a stepper that takes plans in order, a completer that brings results in order.

    WorkerReady is the stepper's word and may overtake results of plans before it, as it may in workers/io.py.
    """

    def __init__(self, num_blocks: int, block_size: int, step_s: float) -> None:
        self.num_blocks, self.block_size, self.step_s = num_blocks, block_size, step_s
        self._model = Model(num_blocks, block_size)
        self._directory = Directory()
        self._mesh: Mesh | None = None
        self._early: list[Reset | StepPlan] = []
        self._stepped_at = self._completed_at = 0.0

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh = mesh
        early, self._early = self._early[-1:], []
        for message in early:
            self._put(message)
        return {}

    def on_message(self, peer: Identity, message: Struct) -> None:
        if isinstance(message, StepPlan):
            self._directory.apply(message)
        if isinstance(message, Reset | StepPlan):
            if self._mesh is None:
                self._early.append(message)
            else:
                self._put(message)

    def _put(self, message: Reset | StepPlan) -> None:
        assert self._mesh is not None
        process = running()
        now = process.world.now
        cost_s = (
            process.dice.random() ** 4 * RESET_S if isinstance(message, Reset) else process.dice.random() * self.step_s
        )
        self._stepped_at = max(now, self._stepped_at) + cost_s
        self._mesh.call_later(self._stepped_at - now, self._step, message)

    def _step(self, message: Reset | StepPlan) -> None:
        assert self._mesh is not None
        if isinstance(message, Reset):
            self._model.rows.clear()  # what the slots hold stays
            kept = self._directory.columns()
            self._say(WorkerReady(message.session, self.num_blocks, self.block_size, 64, 64, VOCAB, *kept))
            return
        process = running()
        now = process.world.now
        tokens = self._model.run(message)
        self._completed_at = max(now + process.dice.random() ** 3 * self.step_s, self._completed_at)
        ns = int(now * 1e9)
        result = StepResult(message.session, message.step, pack_i32(tokens), launched_ns=ns, done_ns=ns + 1)
        self._mesh.call_later(self._completed_at - now, self._say, result)

    def _say(self, message: Struct) -> None:
        assert self._mesh is not None
        try:
            self._mesh.send(Identity(Role.SCHEDULER, self._mesh.identity.index), message)
        except LinkDown:
            self._mesh.log.debug("the scheduler is away", message=type(message).__name__)

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None: ...
    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None: ...
    def beat(self) -> tuple[int, str]:
        return 0, ""

    async def drain(self, limit_s: float) -> None: ...
    async def stop(self) -> None: ...
