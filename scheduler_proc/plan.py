"""Builds one StepPlan: columns in batch order, uniform decodes first."""

from array import array
from dataclasses import dataclass

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import BlockId, Row, StepId
from meshlm.scheduler_proc import sizes
from meshlm.scheduler_proc.request import Request


@dataclass(slots=True, eq=False)
class Inflight:
    """One step in flight: what is needed to make sense of its result."""

    step: StepId
    batch: list[Request]
    samples: bytes  # b"" when all requests sampled
    num_tokens: int
    num_decode_tokens: int
    planned_ns: int
    firsts: tuple[int, ...]  # places of the requests that are computed from their first token on
    num_drafts: "array[int]"  # by batch_index; empty when none has any
    num_pairs: float  # of prompt tokens and the tokens before them that each attends to
    num_encoded: int = 0  # vectors that encoders make in it
    goes_on: bool = False  # requests were running when it was planned: the device need not have waited for work


class PlanBuilder:
    """Collects a step; `finish` makes the message and the record."""

    def __init__(self, removed_rows: list[Row], now_ns: int, names_inputs: bool = False, num_groups: int = 1) -> None:
        self.removed_rows, self.now_ns, self.names_inputs = removed_rows, now_ns, names_inputs
        self.num_groups = num_groups
        self.new_rows: list[NewRow] = []
        self.block_rows, self.block_ids = array("i"), array("i")
        self.num_tokens = 0
        self.num_pairs = 0.0
        self.num_encoded = 0
        self.new_row_bytes = self.prompt_bytes = 0  # of new_rows; of the prompts' log-probabilities in the result
        self.decodes: list[Request] = []  # one token each, and sampling: filled by the planning loop itself
        self.decode_starts: list[int] = []
        self.num_drafts = array("i")  # of the decodes that the planning loop found; empty when none has any
        self._rest: list[Request] = []
        self._rest_starts: list[int] = []
        self._rest_counts: list[int] = []
        self._rest_samples = bytearray()

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    def __len__(self) -> int:
        return len(self.decodes) + len(self._rest)

    def prompt_room(self, request: Request, count: int) -> int:
        """The number of these tokens that the step may compute so that its result fits into a frame: one at least in an empty step."""
        each = sizes.prompt_logprob_bytes(request.work.sampling)
        if not each:
            return count
        return min(count, max((sizes.MAX_STEP_BYTES - self.prompt_bytes) // each, not self.prompt_bytes))

    def add(self, request: Request, count: int, samples: bool) -> None:
        """`count` tokens from request.num_computed on; call before that is advanced."""
        self.num_tokens += count
        self.prompt_bytes += count * sizes.prompt_logprob_bytes(request.work.sampling)
        if count == 1 and samples:
            self.decodes.append(request)
            self.decode_starts.append(request.num_computed)
        else:
            self.num_pairs += count * (request.num_computed + count / 2)
            # A single token that does not sample stands right behind the decodes: all counts of one come first.
            at = 0 if count == 1 else len(self._rest)
            self._rest.insert(at, request)
            self._rest_starts.insert(at, request.num_computed)
            self._rest_counts.insert(at, count)
            self._rest_samples.insert(at, samples)

    def grow(self, row: Row, blocks: list[BlockId]) -> None:
        """`blocks`: of every group, for each row that the block table grows by."""
        self.block_rows.extend([row] * (len(blocks) // self.num_groups))
        self.block_ids.extend(blocks)

    def finish(self, session: int, step: StepId, changes: tuple[bytes, bytes, bytes]) -> tuple[StepPlan, Inflight]:
        """`changes`: BlockPool.take_changes()."""
        batch = self.decodes + self._rest
        samples = bytes(self._rest_samples)
        counts = [1] * len(self.decodes) + self._rest_counts if self._rest else []
        num_drafts = self.num_drafts
        if num_drafts:
            num_drafts.extend([0] * (len(batch) - len(num_drafts)))
        inputs: list[int] = []
        if self.names_inputs:
            inputs = [request.tokens[start] for request, start in zip(self.decodes, self.decode_starts, strict=True)]
        plan = StepPlan(
            session=session,
            step=step,
            rows=pack_i32([request.row for request in batch]),
            starts=pack_i32(self.decode_starts + self._rest_starts),
            counts=pack_i32(counts),
            samples=b"" if all(samples) else b"\x01" * len(self.decodes) + samples,
            num_tokens=self.num_tokens,
            removed_rows=pack_i32(self.removed_rows),
            new_rows=self.new_rows,
            block_rows=self.block_rows.tobytes(),
            block_ids=self.block_ids.tobytes(),
            input_ids=pack_i32(inputs),
            forgotten=changes[0],
            remembered=changes[1],
            hashes=changes[2],
            planned_ns=self.now_ns,
            num_drafts=num_drafts.tobytes(),
        )
        firsts = tuple(
            batch_index for batch_index, start in enumerate(self._rest_starts, len(self.decodes)) if start == 0
        )
        num_decode_tokens = len(self.decodes) + sum(num_drafts)
        counted = (
            self.num_tokens,
            num_decode_tokens,
            self.now_ns,
            firsts,
            num_drafts,
            self.num_pairs,
            self.num_encoded,
        )
        return plan, Inflight(step, batch, plan.samples, *counted)
