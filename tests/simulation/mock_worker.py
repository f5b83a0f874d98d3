"""A device whose next token is a function of the KV contents it was really given. Slots hold a rolling hash of the tokens before.

Where a plan has drafts, a row gets none, one or several tokens, as chance has it; what was drafted and refused stays in the slots.
With several groups of layers each has its own slots for a token, and all that a window sees must be there. Of a recurrent state the
slots of later tokens overwrite those of earlier ones, where its page is carried on; a draft that is refused leaves none.
"""

from collections.abc import Iterable

from rolling_hash import extend, generate, vector_of

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.kv import ChunkedAttention, FullAttention, KVSpec, SlidingWindow
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.wire.columns import ints

VOCAB = 96

Computed = list[tuple[int, int, int]]  # per token of a step: position, id, the slot's hash


def next_token(state: int) -> int:
    return (state >> 7) % VOCAB


def salt_of(number: int) -> int:
    """What the weights of this number add to each token; those of the start nothing."""
    return 1_000 * number


def state_of(tokens: Iterable[int], number: int) -> int:
    """What these tokens leave with the weights of this number."""
    state = 0
    for token in tokens:
        state = extend(state, token + salt_of(number))
    return state


def reference(prompt: Iterable[int], num_tokens: int) -> list[int]:
    return generate(prompt, num_tokens, next_token)


class Model:
    """Rows and KV slots of one device, with these groups. `pooled`: the vectors of the last step, by place."""

    def __init__(self, num_blocks: int, block_size: int, specs: tuple[KVSpec, ...] = ()) -> None:
        self.block_size, self.num_blocks, self.specs = block_size, num_blocks, specs or (FullAttention(),)
        self.slots = [0] * (num_blocks * block_size)
        self.rows: dict[int, tuple[list[int], list[int]]] = {}  # tokens, blocks
        self.pools: dict[int, tuple[PoolKind, int, list[int]]] = {}  # by row: kind, length of the prompt, states so far
        self.pooled: dict[int, bytes] = {}
        self.salt = 0  # of its weights: others give other tokens and another KV

    def extend(self, state: int, token: int) -> int:
        return extend(state, token + self.salt)

    def slot(self, row: int, position: int, group: int) -> int:
        block = self.rows[row][1][position // self.block_size * len(self.specs) + group]
        return block * self.block_size + position % self.block_size

    def state(self, row: int, position: int, group: int = 0) -> int:
        """What the tokens up to this one left. In slots of other groups it would be another number."""
        return self.slots[self.slot(row, position, group)] - group

    def write(self, row: int, position: int, state: int) -> None:
        for group in range(len(self.specs)):
            self.slots[self.slot(row, position, group)] = state + group

    def seen(self, row: int, position: int) -> int:
        """What the tokens before this one left; another number, where a group lacks what this one sees."""
        if not position:
            return 0
        found, tokens = self.state(row, position - 1), self.rows[row][0]
        for group, spec in enumerate(self.specs):
            if isinstance(spec, ChunkedAttention) and position % spec.chunk == 0:
                continue  # it sees nothing before itself
            state = self.state(row, position - 1, group)
            if state != found:
                return found + 1
            oldest = max(0, position - spec.window + 1) if isinstance(spec, SlidingWindow) else position - 1
            if isinstance(spec, ChunkedAttention):
                oldest = position // spec.chunk * spec.chunk
            for at in range(position - 1, oldest, -1):
                before = self.state(row, at - 1, group)
                if state != self.extend(before, tokens[at]):
                    return found + 1
                state = before
        return found

    def run(self, plan: StepPlan, is_last: bool = True) -> tuple[list[int], list[int], Computed]:
        """The sampled tokens, how many of each row, and what was computed for them. Only a pipeline's last stage samples."""
        for row in ints(plan.removed_rows):
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row given away twice"
            self.rows[new.row] = (ints(new.token_ids), ints(new.block_ids))
            self.pools.pop(new.row, None)
            if (pool := find_extra(new.extras, Pool)) is not None:
                self.pools[new.row] = (pool.kind, new.num_prompt_tokens, [])
        block_ids, width = ints(plan.block_ids), len(self.specs)
        for nth, row in enumerate(ints(plan.block_rows)):
            self.rows[row][1].extend(block_ids[nth * width : (nth + 1) * width])
        rows, starts = ints(plan.rows), ints(plan.starts)
        counts = ints(plan.counts) or [1] * len(rows)
        num_drafts = ints(plan.num_drafts) or [0] * len(rows)
        assert sum(counts) + sum(num_drafts) == plan.num_tokens
        samples = plan.samples or b"\x01" * len(rows)
        for place, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            room = len(self.rows[row][1]) // width * self.block_size
            assert start + count + num_drafts[place] <= room, "no block for drafts"
            if samples[place] and is_last:  # drafts may have been refused since the plan was made
                starts[place] = len(self.rows[row][0]) - count
                assert starts[place] <= start, "the row is longer than the scheduler thinks"
        for row, start, token in zip(rows, starts, ints(plan.input_ids)):
            self._know(row, start, token)
        carried = [group for group, spec in enumerate(self.specs) if spec.carried]
        early = {
            row: [self.state(row, start - 1, group) for group in carried]
            for row, start in zip(rows, starts, strict=True)
            if start
        }  # states are read before the step writes any
        computed: Computed = []
        # A layer writes all keys before it reads any, so a prefix may be shared within one step: in order of position.
        for start, row, count in sorted(zip(starts, rows, counts, strict=True)):
            for position in range(start, start + count):
                token = self.rows[row][0][position]
                before = self.seen(row, position)
                if position == start and any(state != before for state in early.get(row, ())):
                    before += 1
                state = self.extend(before, token)
                self.write(row, position, state)
                computed.append((position, token, state))
                if row in self.pools:
                    self.pools[row][2].append(state)
        self._pool(rows, starts, counts)
        tokens: list[int] = []
        given: list[int] = []
        for row, drafts, sampled in zip(rows, num_drafts, samples, strict=True):
            if sampled and (is_last or plan.num_drafts):  # each stage drafts for itself
                dice = (plan.step * 2_654_435_761 + row * 40_503) >> 5
                count = min(dice % 6, 1 + drafts) if plan.num_drafts else 1
                self._sample(row, count, drafts)
                if is_last:
                    given.append(count)
                    tokens += self.rows[row][0][len(self.rows[row][0]) - count :]
        return tokens, given, computed

    def _pool(self, rows: list[int], starts: list[int], counts: list[int]) -> None:
        self.pooled = {}
        for place, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            if row in self.pools:
                kind, num_prompt, states = self.pools[row]
                if start + count == num_prompt:
                    self.pooled[place] = vector_of(states, kind)

    def _sample(self, row: int, count: int, drafts: int) -> None:
        """Append `count` tokens, the later ones drafts that prove right; wrong ones spoil the slots behind, but no state."""
        tokens = self.rows[row][0]
        last, attends = len(tokens) - 1, [group for group, spec in enumerate(self.specs) if not spec.carried]
        state = self.state(row, last)
        for position in range(last, last + 1 + drafts):
            if position > last:  # the others are computed
                drafted = tokens[position] if position < len(tokens) else 0
                state = self.extend(state, drafted)
                for group in range(len(self.specs)) if position - last < count else attends:
                    self.slots[self.slot(row, position, group)] = state + group
            if position - last < count:
                tokens.append(next_token(state))

    def _know(self, row: int, position: int, token: int) -> None:
        """A token that the last stage sampled, and which a stage before learns from the plan."""
        tokens = self.rows[row][0]
        if position == len(tokens):
            tokens.append(token)
        assert tokens[position] == token, "a plan names another token than was sampled"
