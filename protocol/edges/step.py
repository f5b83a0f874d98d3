"""scheduler <-> worker: what to compute, what came out.

A plan carries only what changed. The worker holds persistent rows: token ids, block tables, sampling state. The
order of a plan's columns is the batch order, and results come back in that order, without names. Plans may be
sent before the results of earlier ones are back (asynchronous scheduling): where a row's next input token is
not known to the scheduler yet, it is the one that the worker itself sampled for that row in the step before.

A step may give a row several tokens: where a plan allows drafts, the worker guesses the tokens that follow (its drafter), computes them
together with the known one, samples every position with that position's own draw, and takes the drafted ones in as long as they equal
what was sampled. So the text is the same with and without drafts. The true length of a row lives on the worker; the scheduler knows
the most that it can be.
"""

from msgspec import Struct

from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.kv import FindPages, LeavePages, MovePages, PageMemory, PagesFound, PagesMoved, PagesTaken
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.extras import Extra, Extras
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.lockstep import StepGroup
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import Sleeping
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import ErrorKind, Row, StepId

HASH_BYTES = 32  # of a prefix: sha256
NO_LIMIT = 1 << 30


class Reset(Struct, frozen=True, tag="reset"):
    """A scheduler's first word in each session: forget all rows. The worker answers WorkerReady once it can step.

    `incarnations` are those of the group's workers, by rank, where there are several (tensor and pipeline parallelism). A worker that
    has met others ends: it is started again and meets these.

    A step of an earlier session that waits for workers of other ranks is aborted.

    A worker that is to sleep does so after all earlier steps, and answers WorkerAsleep."""

    session: int
    incarnations: tuple[int, ...] = ()
    group: StepGroup | None = None  # with the workers of other ranks; each step waits for all of them
    sleeping: Sleeping | None = None  # None: as it is; one that begins loads its model
    weights: WeightsVersion | None = None  # that it is to have; None: as it is


class ResetGroup(Struct, frozen=True, tag="disband"):
    """A worker of the group is lost, or its workers are not at the same step. Those that have met end and are started again."""

    reason: str


class NewRow(Struct, frozen=True, omit_defaults=True):
    """A request takes a row: new, or resumed after preemption (then with all its tokens so far)."""

    row: Row
    token_ids: bytes  # int32: prompt + output so far
    num_prompt_tokens: int  # of the original prompt: output token i sits at num_prompt_tokens + i
    block_ids: bytes  # int32[., groups]: the table so far, cached prefix included; any block where no token looks
    sampling: SamplingParams
    extras: Extras = ()
    group: bytes = b""  # whose past answers may be drafted: a digest of the cache_salt; of those without: empty


class StepPlan(Struct, frozen=True, tag="plan", omit_defaults=True):
    """One step. Apply removed_rows, then new_rows, then the appended blocks and input_ids, then compute. All workers of a
    scheduler get the same plans.

    Request i of the batch: row rows[i], computes tokens at positions starts[i] .. starts[i] + counts[i] - 1, and,
    where samples[i], samples the token at position starts[i] + counts[i] (output index that minus
    num_prompt_tokens), which becomes the row's known token there.

    Where samples[i], these are the row's last counts[i] known tokens. After a step with drafts starts[i] is the most that it can be:
    the worker counts back from the row's own end. It may draft num_drafts[i] tokens more and compute them too; the row's blocks hold
    them all.

    A row whose request wants a vector (Pool) never samples. The step that computes the last token of its prompt gives its vector."""

    session: int
    step: StepId
    rows: bytes  # int32[n]; uniform decodes (count 1) first, then the rest
    starts: bytes  # int32[n]
    counts: bytes  # int32[n]; b"" means one each
    samples: bytes  # uint8[n]; b"" means all
    num_tokens: int  # sum(counts) + sum(num_drafts)
    removed_rows: bytes = b""  # int32
    new_rows: list[NewRow] = []
    block_rows: bytes = b""  # int32[m]: row that grows
    block_ids: bytes = b""  # int32[m, groups]: its next block in each group
    # int32[decodes], pipelines only: token at starts[i], which the last stage sampled and the first needs
    input_ids: bytes = b""
    forgotten: bytes = b""  # int32: blocks that hold no known prefix any more
    remembered: bytes = b""  # int32[h]: blocks that do, once this step is done
    hashes: bytes = b""  # HASH_BYTES each: which
    planned_ns: int = 0  # monotonic clock, for the step timeline
    num_drafts: bytes = b""  # int32[n]; b"" means none


class PrepareExtra(Struct, frozen=True, tag="prepare_extra"):
    """A request that waits for a row has this extra. It is prepared beside the steps, and answered with ExtraReady."""

    session: int
    number: int  # of the extra, in this incarnation of the scheduler
    extra: Extra


SchedulerToWorker = Reset | StepPlan | ResetGroup | PrepareExtra | FindPages | MovePages | LeavePages


class WorkerReady(Struct, frozen=True, tag="ready", omit_defaults=True):
    """The worker's facts, in answer to Reset (again after each).

    `kept` and `kept_hashes` are what the session before remembered and did not forget: so the prefix cache outlives the scheduler.
    Least recently remembered first."""

    session: int
    num_blocks: int
    block_size: int
    max_num_seqs: int  # rows
    max_num_batched_tokens: int
    vocab_size: int
    kept: bytes = b""  # int32[h]: blocks
    kept_hashes: bytes = b""  # HASH_BYTES each
    max_drafts: int = 0  # that its drafter gives a row in one step; 0: it has none
    kv_specs: tuple[KVSpec, ...] = ()  # of each group of layers, which has a block table; none: one that keeps all
    pool_kinds: tuple[PoolKind, ...] = ()  # that it gives vectors of ...
    pooled_bytes: int = 0  # ... and the length of one
    attention_wave: int = 0  # tokens of a prompt whose attention over a long context fills the device once; 0: unknown
    max_draft_lines: int = NO_LIMIT  # of a step's rows with drafts: their drafts, and each row's known token
    page_bytes: int = 0  # of its slice of a page; 0: its pages are not moved ...
    namespace: bytes = b""  # ... and what their bytes mean, the same for all workers of a rank
    pages: PageMemory | None = None  # where other workers of this host may read them; None: nowhere
    page_server: tuple[str, int] | None = None  # where other meshes may; None: nowhere
    weights: WeightsVersion = WeightsVersion()  # that it has ...
    behind: str = ""  # ... and why it has no others, where Reset asked for them


class WorkerAsleep(Struct, frozen=True, tag="asleep", omit_defaults=True):
    """The worker is there without this memory, in answer to Reset."""

    session: int
    sleeping: Sleeping
    behind: str = ""  # as in WorkerReady


class LastPlan(Struct, frozen=True, tag="standing"):
    """A worker of a group sends this at once on Reset: the last plan that its process was sent, zeros for none.

    A scheduler may die between sending a plan to one worker and to the next. Then they differ, and the one that has the plan waits for
    the others inside a collective."""

    session: int  # of the Reset
    of_session: int
    step: int


class RowFailed(Struct, frozen=True, omit_defaults=True):
    """Why the request of a row ends with an error, while the others of its step go on."""

    message: str
    kind: ErrorKind = ErrorKind.INVALID  # its own parameters leave no token; OVERLOADED: the host was busy
    param: str = ""  # the client's field at fault; empty: the one that forbids tokens, where there is one


class StepResult(Struct, frozen=True, tag="result", omit_defaults=True):
    """The tokens of one step, in batch order: one per sampling request, or as many as `counts` says."""

    session: int
    step: StepId
    token_ids: bytes  # int32[sum(counts)]
    logprobs: dict[int, LogprobColumns] = {}  # batch place (among all requests of the plan) -> its sampled tokens
    # batch place -> positions starts+1 .. starts+counts within the prompt
    prompt_logprobs: dict[int, LogprobColumns] = {}
    received_ns: int = 0
    launched_ns: int = 0
    done_ns: int = 0
    gpu_ns: int = 0  # from its first kernel to its last, on the device's clock
    gap_ns: int = 0  # that the device was idle before it, since the step before
    counts: bytes = b""  # int32[number of samples], 0 .. 1 + num_drafts each; b"" means one each
    pooled: dict[int, bytes] = {}  # batch place -> float32: the vector of a Pool whose prompt is computed now
    failed: dict[int, RowFailed] = {}  # batch place -> why its request ends with an error; its token here is none
    drafted: bytes = b""  # int32[number of samples], drafted and verified, 0 .. num_drafts each; b"" means num_drafts


class StepFailed(Struct, frozen=True, tag="failed"):
    """The step could not run; the worker goes on living. Every request of the step ends with this message."""

    session: int
    step: StepId
    message: str


class ExtraReady(Struct, frozen=True, tag="extra_ready"):
    """Rows may have the extra from now on; or why none may."""

    session: int
    number: int
    failed: RowFailed | None = None


class WorkerStats(Struct, frozen=True, tag="stats"):
    """A worker's counts, once a second at most, when they have changed."""

    graphs: GraphCounts


WorkerToScheduler = (
    WorkerReady
    | WorkerAsleep
    | LastPlan
    | StepResult
    | StepFailed
    | ExtraReady
    | WorkerStats
    | PagesFound
    | PagesMoved
    | PagesTaken
)
