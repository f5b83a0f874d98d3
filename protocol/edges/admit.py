"""detokenizer <-> coordinator -> scheduler: a request looks for a rank.

The coordinator passes `EngineRequest` through unread but for its prompt ids and priority. Abort takes the same road as the request, so
it can never overtake it.
"""

from msgspec import Struct

from meshlm.protocol.counts import Counted, ProcessCounts
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.extras import Extras
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import AWAKE, Sleeping
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Incarnation, RequestId


class EngineRequest(Struct, frozen=True, omit_defaults=True):
    """Everything a scheduler must know of one request."""

    request_id: RequestId
    handle: Handle  # the detokenizer's; new for each attempt, so late deltas of an older one find nobody
    prompt_token_ids: bytes  # int32, at least one
    sampling: SamplingParams
    attempt: int = 0
    output_token_ids: bytes = b""  # int32: output ids that exist already (resume); sampling goes on after them
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0  # wall clock
    deadline_s: float = 0.0  # wall clock; 0: none
    num_crashes: int = 0  # workers, at other ranks, that died with it in a step since its last token
    extras: Extras = ()
    weights: str = (
        ""  # WeightsVersion.label of what computed its last output token; empty: there is none, or nobody knows
    )

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request can do without the hidden states of tokens whose KV is cached."""
        return self.sampling.prompt_logprobs < 0 and all(extra.reads_prefix_cache for extra in self.extras)


class SchedulerIncarnation(Struct, frozen=True):
    """One incarnation of a scheduler."""

    scheduler: Identity
    incarnation: Incarnation


class Admit(Struct, frozen=True, tag="admit"):
    """A newer attempt takes the place of the older ones, wherever those are. A rank drops what it has already."""

    work: EngineRequest
    dp_rank: int = -1  # -1: the coordinator chooses
    # over, with all incarnations before; the coordinator may not have heard yet
    lost: tuple[SchedulerIncarnation, ...] = ()
    # an earlier incarnation of the coordinator chose dp_rank for this attempt; did Assign get there?
    again: bool = False


class AbortRequests(Struct, frozen=True, tag="abort"):
    """End these requests wherever they are; unknown ids are ignored. No terminal message is sent for them."""

    request_ids: tuple[RequestId, ...]


DetokenizerToCoordinator = Admit | AbortRequests | Counted


class Routed(Struct, frozen=True, tag="routed"):
    """The request now belongs to this rank; if that scheduler dies, the detokenizer admits it again."""

    handle: Handle
    scheduler: Identity
    incarnation: Incarnation


class Refused(Struct, frozen=True, tag="refused"):
    """The terminal message of a request that no rank took."""

    handle: Handle
    kind: ErrorKind
    message: str
    param: str = ""  # with INVALID: the field at fault


class RankLost(Struct, frozen=True, tag="rank_lost"):
    """The coordinator cannot reach this incarnation of a scheduler. What it was sent, and has not answered, it may never have got."""

    scheduler: SchedulerIncarnation


class Readmit(Struct, frozen=True, tag="readmit"):
    """No rank has these any more, or soon none will: admit them again as a new attempt. Unknown handles are ignored."""

    handles: tuple[Handle, ...]
    num_crashes: tuple[int, ...] = ()  # Returned.num_crashes of each; (): none had any
    handed_off: bool = False  # Returned.handed_off of all


CoordinatorToDetokenizer = Routed | Refused | RankLost | Readmit


class Assign(Struct, frozen=True, tag="assign"):
    """The scheduler owns this request from now on, and answers to `detokenizer`."""

    work: EngineRequest
    detokenizer: Identity
    incarnation: Incarnation  # of the detokenizer: a request whose detokenizer was replaced is dropped
    holder: Identity | None = None  # another rank that may have more of the prompt's KV than this one
    # the rank is for prompts: it gives the request back with its first token (Returned.handed_off)
    hands_off: bool = False


class GiveBack(Struct, frozen=True, tag="give_back"):
    """Drop those of these requests that have not started, and say which in Load.returned. No terminal message is sent for them.

    A rank without its workers runs nothing: it gives back those too that had started."""

    request_ids: tuple[RequestId, ...]
    everything: bool = False  # all requests: the rank is going to end


class ReportLoad(Struct, frozen=True, tag="report_load"):
    """Send a Load now, with this number in `answers`: what was sent before this has been seen by then."""

    number: int


class Welcome(Struct, frozen=True, tag="welcome"):
    """To a scheduler that has joined a mesh with --enable-sleep-mode: the memory that its workers were without in the life of the one
    before. It begins no session with them until it knows, since they may have died, too."""

    sleeping: Sleeping = AWAKE


CoordinatorToScheduler = Assign | AbortRequests | GiveBack | ReportLoad | Welcome


class Started(Struct, frozen=True, array_like=True):
    """A request's first token is sampled."""

    request_id: RequestId
    num_cached: int  # prompt tokens that were found in the prefix cache


class Returned(Struct, frozen=True, array_like=True):
    """A request that was given back; nothing of it is left at the rank."""

    request_id: RequestId
    attempt: int
    handle: Handle
    detokenizer: Identity
    incarnation: Incarnation  # of the detokenizer
    num_crashes: int = 0  # as in EngineRequest
    handed_off: bool = False  # its prompt is computed here, and its KV leased to the rank that decodes


class Load(Struct, frozen=True, tag="load"):
    """A rank's state, sent after a step that changed it and at least every second while requests run."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    outstanding_prefill_tokens: int
    ended: tuple[RequestId, ...] = ()  # since the last Load
    steps: int = 0
    prefix_cache_queries: int = 0  # tokens, since start
    prefix_cache_hits: int = 0  # tokens, since start
    num_preemptions: int = 0  # since start
    prompt_tokens: int = 0  # computed, since start
    generation_tokens: int = 0  # since start
    serving: bool = True  # its workers are ready
    block_size: int = 16
    live_tokens: int = 0  # output tokens that requests which have not ended got from this rank
    started: tuple[Started, ...] = ()  # since the last Load
    returned: tuple[Returned, ...] = ()  # since the last Load
    graphs: GraphCounts | None = None  # its worker's; None: as it said last
    busy_ns: int = 0  # that the device has computed, since start
    idle_ns: int = 0  # that it stood still although requests were running, since start
    answers: int = 0  # the newest ReportLoad of this incarnation of the coordinator; 0: none yet
    paused: bool = False  # it plans no step, as an operator wants it
    counts: ProcessCounts | None = None  # for /metrics; None: as it said last
    sleeping: Sleeping = AWAKE  # its workers
    kv_cache_tokens: int = 0  # of requests of the full context that decode side by side ...
    kv_cache_requests: float = 0.0  # ... and their number
    num_hand_offs: int = 0  # requests that went on at a rank that decodes, since start
    weights: WeightsVersion | None = None  # of its workers; None: they have not said it yet
    behind: str = ""  # why they have no others


SchedulerToCoordinator = Load
