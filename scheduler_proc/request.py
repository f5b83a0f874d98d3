"""One request as its scheduler sees it.

There is no prefill or decode phase: a request has tokens, some of them computed, and must catch up. `num_output_placeholders` counts
tokens that the worker is sampling or will sample in steps already sent; their values are not known here yet. Where steps have drafts
it counts all of them as if they were accepted, and so does `num_computed`: both are upper bounds until the results are here.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from itertools import chain

from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.extra_kind import EncoderInput, Span
from meshlm.protocol.extras import Extra, encoder_inputs, generates, max_drafts, slot_key, uncut_spans, with_keys
from meshlm.protocol.sampling import RepetitionDetection
from meshlm.protocol.wire.ids import BlockId, Handle, Identity, Incarnation, Row
from meshlm.runtime.process.events import check_transition
from meshlm.scheduler_proc.connectors.load import Load
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.states import TRANSITIONS, RequestState, Wait


@lru_cache(1024)
def _stop_ids(*ids: tuple[int, ...]) -> frozenset[int]:
    """One object for all requests that stop at the same tokens: each step looks into it for each of them."""
    return frozenset(chain(*ids))


@dataclass(slots=True, eq=False)
class Preparation:
    """An extra that requests share and workers prepare; preparations.py changes it."""

    number: int
    extra: Extra
    missing: set[Identity]  # workers that have not prepared it: its requests wait for them
    requests: "set[Request]" = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Request:
    """Plain data; core.py changes it."""

    work: EngineRequest
    detokenizer: Identity
    incarnation: Incarnation
    max_model_len: InitVar[int]
    handle: Handle = field(init=False)
    tokens: "array[int]" = field(init=False)
    num_given: int = field(init=False)  # tokens when it came here
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)
    generates: bool = True  # as its extras say, like the next five
    max_drafts: int | None = None  # drafted tokens that a step may verify, at most; None: any number
    uncut: Sequence[Span] = ()
    encoder_inputs: Sequence[EncoderInput] = ()
    slot_key: bytes = b""
    extra_keys: hashes.ExtraKeys = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    repetition: RepetitionDetection | None = field(init=False)
    state: RequestState = RequestState.WAITING
    story: deque[str] = field(default_factory=lambda: deque(["arrived"], maxlen=12))
    row: Row = Row(-1)
    blocks: list[BlockId] = field(
        default_factory=list
    )  # its block table, row by row; this and the next five are kv/cache.py's
    num_freed: list[int] = field(default_factory=list)  # leading rows that were given back, by kind of group
    free_at: int = 0  # computed tokens from which on the next ones are
    capacity: int = 0  # tokens that its blocks hold
    num_cached_blocks: int = 0  # leading rows that the prefix cache knows or that came from it
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks
    num_computed: int = 0  # tokens whose KV is written once all sent steps have run
    num_output_placeholders: int = 0
    num_crashes: int = field(init=False)  # deaths of its worker between which it did not get on ...
    crashed_at: int = field(init=False)  # ... and its tokens at the last one, with those under way
    arrived_ns: int = 0  # here ...
    started_ns: int = 0  # ... and in the batch for the first time
    preempted_ns: tuple[int, ...] = ()  # when it was preempted
    num_cached: int = -1  # prompt tokens found cached, the fewest time; -1: not scheduled yet, -2: told
    num_reused: int = -1  # the same; stays
    drafts: bytes = b""  # uint8[., 2]: tokens drafted and accepted, for its next row (Limits.counts_drafts)
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    preparations: list[Preparation] = field(default_factory=list)  # of its extras
    holder: Identity | None = None  # as in Assign, like the next one
    hands_off: bool = False
    kv_transfer: bytes = b""  # kv_transfer_params that its end tells (connectors/left.py)
    load: Load | None = (
        None  # that it waits for, or that keeps its KV; this and the next three are connectors/loads.py's
    )
    num_loaded: int = 0  # tokens of it that the last load has brought
    num_looks: int = 0  # how often its KV was looked for elsewhere, since it was preempted
    pages_short: int = 0  # it is looked for again once so many pages are free, and nobody passes it meanwhile

    def __post_init__(self, max_model_len: int) -> None:
        work, params = self.work, self.work.sampling
        self.handle, self.repetition = work.handle, params.repetition_detection
        self.tokens = array("i", work.prompt_token_ids + work.output_token_ids)
        self.num_given, self.num_prompt = len(self.tokens), len(work.prompt_token_ids) // 4
        if extras := work.extras:
            self.generates, self.uncut = generates(extras), uncut_spans(extras)
            self.max_drafts, self.slot_key = max_drafts(extras), slot_key(extras)
            self.encoder_inputs = encoder_inputs(extras)
        self.extra_keys = hashes.ExtraKeys(work.cache_salt, with_keys(extras) if extras else ())
        self.max_len = min(self.num_prompt + (params.max_tokens if self.generates else 0), max_model_len)
        self.stop_ids = _stop_ids(params.stop_token_ids, params.eos_token_ids)
        self.num_crashes, self.crashed_at = work.num_crashes, self.num_given if work.num_crashes else 0

    @property
    def has_begun(self) -> bool:
        """Whether it has run here before, or elsewhere as far as its first token."""
        return self.num_cached != -1 or len(self.tokens) > self.num_prompt

    @property
    def waits(self) -> Wait | None:
        """What it waits for while others may pass it; None: it may run."""
        if self.num_output_placeholders:
            return Wait.RESULTS
        if self.preparations and any(one.missing for one in self.preparations):
            return Wait.EXTRAS
        if self.load is not None and self.load.waits:
            return Wait.KV
        return None

    def output_from(self, index: int) -> "array[int]":
        """Output tokens from this index on."""
        return self.tokens[self.num_prompt + index :]

    @property
    def order(self) -> tuple[int, float, str]:
        """Among requests by priority: lower first, then earlier."""
        return (self.work.priority, self.work.arrival_s, self.work.request_id)

    def crashed(self) -> int:
        """The request's worker died with it in a step; gives how often that was since it got on. It may have died of any token that was
        under way, so the tokens that were do not count as getting on."""
        self.suspect(1 if len(self.tokens) > self.crashed_at else self.num_crashes + 1)
        return self.num_crashes

    def suspect(self, num_crashes: int) -> None:
        """So many workers have died with it by now, or a step with it has failed, which counts as as many."""
        self.num_crashes, self.crashed_at = num_crashes, len(self.tokens) + self.num_output_placeholders

    def is_suspect(self, max_crashes: int) -> bool:
        """Whether its workers died so often, or a step with it failed, since it got on."""
        return self.num_crashes >= max_crashes and len(self.tokens) <= self.crashed_at

    def move(self, state: RequestState) -> None:
        """Change state. InvalidTransition when the table has no such entry."""
        check_transition(TRANSITIONS, self.state, state, self.work.request_id, self.story)
        self.state = state
        self.story.append(f"{state.value} at {self.num_computed}/{len(self.tokens)}+{self.num_output_placeholders}")
