"""`--device fake`: a model without weights that proves its KV cache. No torch.

The next token is a hash of all tokens found through the row's block table, slot by slot: the slot of position p holds a rolling
hash of tokens 0..p, made from what the slot of position p - 1 really holds. A wrong block table shows as a wrong token.
"""

import time

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.control_edge import GraphCounts
from meshlm.protocol.step_edge import StepPlan, StepResult
from meshlm.protocol.token_edge import LogprobColumns
from meshlm.workers import room
from meshlm.workers.engine import Done, EngineFacts, ProgressReport
from meshlm.workers.rows import I32, RowTable, StepArrays

_FACTOR = 6364136223846793005  # odd, so that it has an inverse mod 2^64 (Knuth's MMIX multiplier)
_INVERSE = pow(_FACTOR, -1, 1 << 64)
DEFAULT_CACHE_TOKENS = 1 << 20
FIRST_TOKEN = 256  # smaller ids are often special

U64 = NDArray[np.uint64]


def _powers(base: int, count: int) -> U64:
    values = np.full(count, base, np.uint64)
    values[0] = 1
    return np.multiply.accumulate(values)


def expected_token(tokens: list[int], vocab_size: int) -> int:
    """What the fake model says after `tokens`; the tests' oracle."""
    state = 0
    for token in tokens:
        state = (state * _FACTOR + token + 1) & 0xFFFF_FFFF_FFFF_FFFF
    return FIRST_TOKEN + (state >> 33) % (vocab_size - FIRST_TOKEN)


def _columns(token_ids: I32, width: int, vocab_size: int) -> LogprobColumns:
    """The token is the likeliest, at -1, and those after it follow, at -2, -3 ..."""
    top = (token_ids[:, None] + np.arange(width, dtype=np.int32)) % vocab_size
    likely = np.broadcast_to(-1 - np.arange(width, dtype=np.float32), top.shape)
    count = len(token_ids)
    return LogprobColumns(
        width,
        np.full(count, -1, np.float32).tobytes(),
        np.ones(count, np.int32).tobytes(),
        top.astype(np.int32).tobytes(),
        likely.tobytes(),
    )


class FakeEngine:
    """See `meshlm.workers.engine.Engine`."""

    def __init__(self, config: MeshConfig, report: ProgressReport) -> None:
        resolved = config.resolved
        assert resolved is not None
        self._vocab_size = resolved.spec.vocab_size
        self._step_s = config.worker.fake_step_ms / 1e3
        block_size = config.cache.block_size
        per_token = resolved.spec.kv_bytes_per_token_f32
        memory = config.cache.kv_cache_memory
        budget = memory or max(DEFAULT_CACHE_TOKENS, resolved.max_model_len + block_size) * per_token
        num_blocks = room.num_blocks(config, budget, block_size * per_token)
        self.facts = EngineFacts(num_blocks, block_size, resolved.max_num_seqs, self._vocab_size, {"fake": "yes"})
        self._rows = RowTable(resolved.max_num_seqs, resolved.max_model_len, block_size)
        self._state = np.zeros(num_blocks * block_size, np.uint64)
        self._free_at = 0.0
        longest = resolved.max_num_batched_tokens + 1
        self._up, self._down = _powers(_FACTOR, longest), _powers(_INVERSE, longest)

    def reset(self) -> None:
        self._rows.reset()

    def idle(self) -> bool:
        return False

    def graph_counts(self) -> GraphCounts:
        return GraphCounts()

    def step(self, plan: StepPlan, received_ns: int) -> Done:
        self._rows.apply(plan)
        arrays = self._rows.step(plan)
        launched = time.monotonic_ns()
        token_ids = self._compute(arrays, bool(plan.new_rows))
        self._rows.sampled(arrays, token_ids)
        if self._step_s:
            begun = max(self._free_at, time.monotonic())
            self._free_at = begun + self._step_s
            time.sleep(max(0.0, self._free_at - time.monotonic()))
        return Done(
            StepResult(
                session=plan.session,
                step=plan.step,
                token_ids=token_ids.tobytes(),
                logprobs=self._logprobs(arrays, token_ids),
                prompt_logprobs=self._prompt_logprobs(arrays),
                received_ns=received_ns,
                launched_ns=launched,
                done_ns=time.monotonic_ns(),
            )
        )

    def _logprobs(self, arrays: StepArrays, token_ids: I32) -> dict[int, LogprobColumns]:
        wanted = {}
        for nth, place in enumerate(np.flatnonzero(arrays.samples).tolist()):
            width = self._rows.sampling[int(arrays.rows[place])].logprobs
            if width >= 0:
                wanted[place] = _columns(token_ids[nth : nth + 1], width, self._vocab_size)
        return wanted

    def _prompt_logprobs(self, arrays: StepArrays) -> dict[int, LogprobColumns]:
        """Of the prompt tokens that follow the positions of this step."""
        wanted = {}
        for place, (row, start, count) in enumerate(zip(arrays.rows, arrays.starts, arrays.counts, strict=True)):
            width = self._rows.sampling[int(row)].prompt_logprobs
            end = min(int(start + count), int(self._rows.num_prompt[row]) - 1)
            if width >= 0 and start < end:
                wanted[place] = _columns(self._rows.tokens[row, start + 1 : end + 1], width, self._vocab_size)
        return wanted

    def _compute(self, arrays: StepArrays, has_new_rows: bool) -> NDArray[np.int32]:
        """Write every token's state, read the last one's of the rows that sample."""
        if has_new_rows or len(arrays.slots) > len(arrays.rows):
            self._write_in_order(arrays)
        else:
            self._write_decodes(arrays)
        last = arrays.slots[arrays.query_start[1:] - 1][arrays.samples]
        chosen = (self._state[last] >> np.uint64(33)) % np.uint64(self._vocab_size - FIRST_TOKEN)
        return (chosen + np.uint64(FIRST_TOKEN)).astype(np.int32)

    def _slots_before(self, arrays: StepArrays) -> NDArray[np.int64]:
        """Where the token before each request's first one is (slot of position 0 for those that start at 0)."""
        block_size = self._rows.block_size
        before = np.maximum(arrays.starts.astype(np.int64) - 1, 0)
        blocks: NDArray[np.int64] = self._rows.blocks[arrays.rows, before // block_size].astype(np.int64)
        slots: NDArray[np.int64] = blocks * block_size + before % block_size
        return slots

    def _write_decodes(self, arrays: StepArrays) -> None:
        terms = (arrays.token_ids.astype(np.int64) + 1).astype(np.uint64)
        carried = np.where(arrays.starts > 0, self._state[self._slots_before(arrays)], np.uint64(0))
        self._state[arrays.slots] = carried * np.uint64(_FACTOR) + terms

    def _write_in_order(self, arrays: StepArrays) -> None:
        """By first position: a request may share a prefix that another one computes in this very step, as a real model
        allows, which writes all keys and values of a layer before it reads any."""
        terms = (arrays.token_ids.astype(np.int64) + 1).astype(np.uint64)
        before = self._slots_before(arrays)
        for index in np.argsort(arrays.starts, kind="stable").tolist():
            begin, end = int(arrays.query_start[index]), int(arrays.query_start[index + 1])
            count = end - begin
            carried = self._state[before[index]] if arrays.starts[index] else np.uint64(0)
            # state[k] = carried * F^(k+1) + sum_j<=k term[j] * F^(k-j)
            sums = np.cumsum(terms[begin:end] * self._down[:count], dtype=np.uint64)
            self._state[arrays.slots[begin:end]] = carried * self._up[1 : count + 1] + sums * self._up[:count]
