"""`--device fake`: a model without weights that proves its KV cache. No torch.

The next token is a hash of all tokens found through the row's block table, slot by slot: the slot of position p holds a rolling
hash of tokens 0..p, made from what the slot of position p - 1 really holds. A wrong block table shows as a wrong token. A model with
sliding windows has several groups of layers, with a table each: then all that a window holds is looked at. A recurrent state has a
group, too: where its page is carried on, the slots of later tokens overwrite those of earlier ones. Of drafts that are refused it has
none.

With `--fake-drafts` it drafts too: right tokens and, at places that only chance names, wrong ones, whose KV then stands behind the
row's end until it is overwritten. Now and then it drafts fewer for a row than it may, or gives it no token at all. Where a row keeps
to a grammar its drafts do, but for the wrong ones.
"""

import time
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.step import StepPlan, StepResult
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.kv import FullAttention, caches_of, make_groups
from meshlm.protocol.lockstep import StepAgreement
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.sleeping import KV_CACHE
from meshlm.workers import kv_capacity
from meshlm.workers.distributed.lockstep import StepExchange
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.engine import NOT_BALANCED, Done, EngineFacts, ProgressReport
from meshlm.workers.fake.extras import FakeHead, FakeRows, StepArrays, extras_of
from meshlm.workers.fake.tokens import FACTOR, FIRST_TOKEN, INVERSE, U64, columns, dice, powers
from meshlm.workers.kv.pages import HostPages, SharedBytes
from meshlm.workers.output.grammars import GrammarRows, Grammars, TokenMask
from meshlm.workers.output.mask_process import MaskProcess
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.extras.extra import with_findings
from meshlm.workers.rows.step_columns import COMPUTED, Drafts, Lines, StepColumns, columns_of

DEFAULT_CACHE_TOKENS = 1 << 20
FAKE_WEIGHTS = "fake_weights.bin"  # in a model's folder
VECTOR_BYTES = 4 * 8  # of a Pool
WRONG_EVERY, NONE_EVERY, FEWER_EVERY = 3, 7, 5  # one draft, and one row of a step with drafts, of so many


def worker_engine(config: MeshConfig, worker: int, membership: Membership, report: ProgressReport) -> "FakeEngine":
    """The engine of `--device fake`, once the workers of its group have met."""
    while config.parallel.workers_per_rank > 1 and not membership.commit(membership.wait()):
        pass
    return FakeEngine(config, report)


def _make_state(config: MeshConfig, num_blocks: int, block_size: int) -> tuple[U64, HostPages | None]:
    """The slots of all blocks, all zeros; and the same as pages, where those move."""
    moved, page_bytes = config.kv_transfer, 8 * block_size
    shared = SharedBytes(num_blocks * page_bytes) if moved.shares_pages else None
    slots = np.zeros(num_blocks * block_size, np.uint64) if shared is None else shared.array.view(np.uint64)
    if not moved.moves:
        return slots, None
    columns = [slots.view(np.uint8).reshape(num_blocks, page_bytes)]
    return slots, HostPages(columns, None if shared is None else shared.memory(columns))


class FakeEngine:
    def __init__(self, config: MeshConfig, report: ProgressReport) -> None:
        resolved = config.require_resolved()
        self._vocab_size = resolved.spec.vocab_size
        self._step_s = config.worker.fake_step_ms / 1e3
        block_size = config.cache.block_size
        attention = resolved.spec.attention
        layer_bytes = 4 * (attention.numbers_kept if attention is not None else resolved.spec.hidden_size)
        per_token = resolved.spec.kv_bytes_per_token_f32 or layer_bytes
        memory, drafts = config.cache.kv_cache_memory, config.worker.fake_drafts
        budget = memory or max(DEFAULT_CACHE_TOKENS, resolved.max_model_len + block_size) * per_token
        state = kv_capacity.state_spec(config.cache, block_size)  # it takes a page of attention's
        kinds = [one if one.num_held(1, 1) else FullAttention() for _, one in caches_of(resolved.spec, state)]
        groups = make_groups(kinds, block_size, layer_bytes, resolved.max_model_len)
        specs = tuple(group.spec for group in groups)
        num_blocks = kv_capacity.num_blocks(config, budget, groups[0].page_bytes, specs, drafts)
        self.facts = EngineFacts(
            num_blocks, block_size, resolved.max_num_seqs, self._vocab_size, {"fake": "yes"}, drafts, tuple(PoolKind),
            VECTOR_BYTES, specs, (1, 8),  # all workers of a rank have the same KV
        )  # fmt: skip
        self._rows = FakeRows(resolved.max_num_seqs, resolved.max_model_len, block_size, len(specs))
        grammars, vector_len = Grammars(MaskProcess(resolved)), VECTOR_BYTES // 4
        self.extras = self._rows.table.extras = extras_of(self._rows, grammars, self._vocab_size, vector_len)
        self._spans = {nth: spec for nth, spec in enumerate(specs) if not (spec.keeps_all or spec.carried)}
        self._states = np.array([spec.carried for spec in specs])
        self._written = np.zeros(0, np.uint64)  # the states of the last step's tokens
        self._groups = np.arange(len(specs), dtype=np.uint64)  # added to what a group's slots hold: groups differ
        self._state, self.pages = _make_state(config, num_blocks, block_size)
        self._weights = np.uint64(0)  # added for each token: others are other tokens and another KV
        self.load_weights(resolved)
        self._free_at = 0.0
        self._without: tuple[str, ...] = ()  # what sleeps
        self._exchange: StepExchange | None = None  # with other ranks, if they step together
        self._num_together = 0  # steps with them
        self.agreed: StepAgreement | None = None  # for the last of these
        longest = resolved.max_num_batched_tokens + 1
        self._up, self._down = powers(FACTOR, longest), powers(INVERSE, longest)

    def reset(self) -> None:
        self._rows.table.reset()

    def join(self, exchange: StepExchange | None) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange, self._num_together = exchange, 0
        if exchange is not None:
            exchange.connect()

    def idle(self) -> bool:
        return False

    def be_without(self, tags: tuple[str, ...]) -> None:
        self._without = tags
        if KV_CACHE in tags:
            self._state[:] = 0

    def check_weights(self, resolved: Resolved) -> str:
        return ""

    def load_weights(self, resolved: Resolved) -> None:
        """Has the number in the folder's FAKE_WEIGHTS, where there is that file."""
        file = Path(resolved.model_path) / FAKE_WEIGHTS
        self._weights = np.uint64(int(file.read_text()) if file.is_file() else 0)

    def sum_weights(self) -> str:
        return f"{int(self._weights):016x}"

    def _terms(self, token_ids: I32) -> U64:
        return (token_ids.astype(np.int64) + 1).astype(np.uint64) + self._weights

    def rebalance(self) -> str:
        return NOT_BALANCED

    def graph_counts(self) -> GraphCounts:
        return GraphCounts()

    def step(self, plan: StepPlan, received_ns: int) -> Done:
        assert not self._without, "a step in its sleep"
        if self._exchange is not None:
            self._num_together += 1
            self.agreed = self._exchange.agree(StepAgreement(self._num_together, plan.num_tokens, True, False))
        self._rows.apply(plan)
        num_drafts = self._draft(plan)
        step = StepColumns(self._from_row_ends(plan, num_drafts) if self.facts.max_drafts else plan)
        if num_drafts is not None:
            step.drafts = self._rows.last_tokens(step.rows[step.places], num_drafts[step.places])
        extras, arrays, head = self.extras.for_step(step), self._rows.step(step), FakeHead(self._vocab_size)
        launched = time.monotonic_ns()
        states = self._state[arrays.slots[:, self._states]]
        if plan.new_rows or len(arrays.slots) > len(arrays.rows):
            self._write_in_order(arrays)
        else:
            self._write_decodes(arrays)
        for extra in extras:
            extra.before_head(head)
            extra.after_model(self._written)
        token_ids, counts = self._sample(self._written[step.lines().tokens], head.masked), None
        if step.drafts is None:
            self._rows.sampled(arrays, token_ids)
        else:
            token_ids, counts = self._accept(plan.step, arrays.rows[arrays.samples], step.drafts, token_ids)
            self._keep(step.lines(), arrays, states, 1 + step.drafts.counts, counts)
        for extra in extras:
            extra.after_head(token_ids, COMPUTED, counts)
        if self._step_s:
            begun = max(self._free_at, time.monotonic())
            self._free_at = begun + self._step_s
            time.sleep(max(0.0, self._free_at - time.monotonic()))
        result = StepResult(
            session=plan.session, step=plan.step, token_ids=token_ids.tobytes(),
            logprobs=self._logprobs(arrays, token_ids, counts), received_ns=received_ns, launched_ns=launched,
            done_ns=time.monotonic_ns(), counts=b"" if counts is None else counts.tobytes(),
            drafted=b"" if step.drafts is None else step.drafts.counts.tobytes(),
        )  # fmt: skip
        return Done(with_findings(result, extras))

    def _draft(self, plan: StepPlan) -> I32 | None:
        """Write the drafts that the plan allows behind the rows' tokens, as if they were known; how many each row has, or None."""
        if not plan.num_drafts:
            return None
        num_drafts, table = np.frombuffer(plan.num_drafts, np.int32).copy(), self._rows
        rows = np.frombuffer(plan.rows, np.int32)
        fewer = (dice(rows, table.num_known[rows]) % FEWER_EVERY == 0) & (num_drafts > 0)
        num_drafts[fewer] -= 1
        drafting = num_drafts > 0
        rows, counts = rows[drafting], num_drafts[drafting]
        ends = table.num_known[rows]
        before = np.maximum(ends.astype(np.int64) - 2, 0)
        state = np.where(ends > 1, self._state[table.slots(rows, before)[:, 0]], np.uint64(0))
        table.num_known[rows] += counts
        for nth in range(int(counts.max(initial=0))):
            more = counts > nth
            rows, ends, state, counts = rows[more], ends[more], state[more], counts[more]
            state = state * np.uint64(FACTOR) + self._terms(table.tokens[rows, ends + nth - 1])
            wrong = dice(rows, ends + nth) % WRONG_EVERY == 0
            right = self._sample(state, self._mask_behind(rows, ends, nth))
            table.tokens[rows, ends + nth] = np.where(wrong, FIRST_TOKEN, right)
        return num_drafts

    def _mask_behind(self, rows: I32, ends: I32, count: int) -> TokenMask | None:
        """The tokens that the grammars of these rows allow behind their first `count` drafts, which begin at `ends`."""
        counts = np.full(len(rows), count, np.int32)
        step = columns_of(rows, ends, counts + 1)
        step.drafts = Drafts(counts, self._rows.tokens[rows[:, None], ends[:, None] + np.arange(count)].ravel())
        mask = self.extras.kind(GrammarRows).grammars.of_step(rows, step).mask()
        return None if mask is None else mask.of(np.arange(len(rows)) * (1 + count) + count)

    def _from_row_ends(self, plan: StepPlan, num_drafts: I32 | None) -> StepPlan:
        """The plan with the places where rows really are, and with the drafts among the tokens to be computed."""
        rows, starts = np.frombuffer(plan.rows, np.int32), np.frombuffer(plan.starts, np.int32)
        counts = np.frombuffer(plan.counts, np.int32) if plan.counts else np.ones(len(rows), np.int32)
        counts = counts if num_drafts is None else counts + num_drafts
        samples = np.frombuffer(plan.samples, np.uint8) > 0 if plan.samples else np.ones(len(rows), np.bool_)
        starts = np.where(samples, self._rows.num_known[rows] - counts, starts)
        columns = {"starts": starts.astype(np.int32).tobytes(), "counts": counts.tobytes()}
        return msgspec.structs.replace(plan, **columns, num_tokens=int(counts.sum()))

    def _accept(self, step: int, rows: I32, drafts: Drafts, sampled: I32) -> tuple[I32, I32]:
        """The tokens that these rows get of those that were sampled at their lines, up to the first draft that differs; and how many
        each got."""
        table, tokens = self._rows, list[I32]()
        ends = np.cumsum(1 + drafts.counts).tolist()
        for row, count, end in zip(rows.tolist(), drafts.counts.tolist(), ends, strict=True):
            known, given = int(table.num_known[row]) - count, sampled[end - 1 - count : end]
            right = given[:count] == table.tokens[row, known : known + count]
            given = given[: 1 + int(np.logical_and.accumulate(right).sum())]
            if dice(np.array([row]), np.array([step]))[0] % NONE_EVERY == 0:
                given = given[:0]
            table.tokens[row, known : known + len(given)] = given
            table.num_known[row] = known + len(given)
            tokens.append(given)
        counts = np.array([len(given) for given in tokens], np.int32)
        return np.concatenate([*tokens, np.empty(0, np.int32)]), counts

    def _keep(self, lines: Lines, arrays: StepArrays, before: U64, each: I32, counts: I32) -> None:
        """Keeps so many (counts) of the lines of each request with drafts; others leave no states. before: what slots held."""
        nth = np.arange(len(lines.tokens)) - np.repeat(np.cumsum(each) - each, each)
        slots, drafted = arrays.slots[:, self._states], np.repeat(each > 1, each)
        self._state[slots[lines.tokens[drafted]]] = before[lines.tokens[drafted]]
        kept = lines.tokens[drafted & (nth < np.repeat(counts, each))]
        self._state[slots[kept]] = self._written[kept, None] + self._groups[self._states]

    def _logprobs(self, arrays: StepArrays, token_ids: I32, counts: I32 | None) -> dict[int, LogprobColumns]:
        wanted: dict[int, LogprobColumns] = {}
        at = 0
        if (self._rows.table.columns["logprobs"][arrays.rows] < 0).all():
            return wanted
        for nth, place in enumerate(np.flatnonzero(arrays.samples).tolist()):
            count = 1 if counts is None else int(counts[nth])
            sampling = self._rows.table.columns.params[int(arrays.rows[place])]
            if sampling.logprobs >= 0:
                found = columns(token_ids[at : at + count], sampling.logprobs, self._vocab_size)
                if sampling.logprob_token_ids:
                    certain = np.array(sampling.logprob_token_ids * count, np.int32)
                    found = msgspec.structs.replace(found, top_ids=certain.tobytes())
                wanted[place] = found
            at += count
        return wanted

    def _sample(self, state: U64, mask: TokenMask | None) -> I32:
        """The tokens that follow those of these states; where a grammar allows only some, one of these."""
        tokens = self._tokens_of(state)
        if mask is not None:
            for line, allowed in zip(mask.lines, mask.allowed(self._vocab_size), strict=True):
                # None is allowed where the row has failed.
                if not allowed[tokens[line]] and len(among := np.flatnonzero(allowed)):
                    tokens[line] = among[int(state[line] >> np.uint64(33)) % len(among)]
        return tokens

    def _tokens_of(self, state: U64) -> I32:
        chosen = (state >> np.uint64(33)) % np.uint64(self._vocab_size - FIRST_TOKEN)
        return (chosen + np.uint64(FIRST_TOKEN)).astype(np.int32)

    def _carried(self, rows: I32, starts: I32) -> U64:
        """The sums that the tokens before these left in the cache; others, where a group's table lacks what a token here can see."""
        before = np.maximum(starts.astype(np.int64) - 1, 0)
        found = self._state[self._rows.slots(rows, before)] - self._groups
        num_seen = {
            group: np.array([start - max(0, spec.first_seen(start)) for start in starts.tolist()], np.int64)
            for group, spec in self._spans.items()
        }
        for group, count in num_seen.items():  # the first token of a chunk sees nothing there
            found[:, group] = np.where(count, found[:, group], found[:, 0])
        wrong = (found != found[:, :1]).any(1)
        for group, count in num_seen.items():
            wrong |= self._is_broken(rows, before, group, count)
        return np.where(starts > 0, found[:, 0] + wrong, np.uint64(0))

    def _is_broken(self, rows: I32, last: I64, group: int, count: I64) -> NDArray[np.bool_]:
        """Whether the slots of the `count` positions up to `last` do not follow from one another."""
        back = np.arange(count.max(initial=0))
        positions = last[:, None] - back
        exist, positions, rows = back < count[:, None], np.maximum(positions, 0), rows[:, None]
        state = self._state[self._rows.slots(rows, positions)[..., group]] - self._groups[group]
        terms = self._terms(self._rows.tokens[rows, positions])
        older = np.where(positions[:, :-1] > 0, state[:, 1:] * np.uint64(FACTOR), np.uint64(0))
        broken: NDArray[np.bool_] = ((state[:, :-1] != older + terms[:, :-1]) & exist[:, :-1]).any(1)
        return broken

    def _write_decodes(self, arrays: StepArrays) -> None:
        terms = self._terms(arrays.token_ids)
        state = self._carried(arrays.rows, arrays.starts) * np.uint64(FACTOR) + terms
        self._state[arrays.slots] = state[:, None] + self._groups
        self._written = state

    def _write_in_order(self, arrays: StepArrays) -> None:
        """Writes in the order of first positions: a request may share a prefix that another one computes in this very step, as a real
        model allows, which writes all keys and values of a layer before it reads any."""
        terms = self._terms(arrays.token_ids)
        self._written = np.zeros(len(terms), np.uint64)
        before = np.maximum(arrays.starts.astype(np.int64) - 1, 0)
        # a model reads all before it writes any
        states = self._state[self._rows.slots(arrays.rows, before)][:, self._states]
        for index in np.argsort(arrays.starts, kind="stable").tolist():
            begin, end = int(arrays.query_start[index]), int(arrays.query_start[index + 1])
            count = end - begin
            carried = self._carried(arrays.rows[index : index + 1], arrays.starts[index : index + 1])
            at = self._rows.slots(arrays.rows[index : index + 1], before[index : index + 1])
            if arrays.starts[index] and (states[index] != self._state[at][0, self._states]).any():
                carried = carried + np.uint64(1)
            # state[k] = carried * F^(k+1) + sum_j<=k term[j] * F^(k-j)
            sums = np.cumsum(terms[begin:end] * self._down[:count], dtype=np.uint64)
            state = carried * self._up[1 : count + 1] + sums * self._up[:count]
            self._state[arrays.slots[begin:end]] = state[:, None] + self._groups
            self._written[begin:end] = state
