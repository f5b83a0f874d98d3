"""One request as its scheduler sees it.

There is no prefill or decode phase: a request has tokens, some of them computed, and must catch up. `num_output_placeholders` counts
tokens that the worker is sampling or will sample in steps already sent; their values are not known here yet. Where steps have drafts
it counts all of them as if they were accepted, and so does `num_computed`: both are upper bounds until the results are here.
"""

from array import array
from collections import deque
from functools import lru_cache
from itertools import chain

from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.extras import Extra, generates, uncut_spans, with_keys
from meshlm.protocol.wire.ids import BlockId, Identity, Incarnation, Row
from meshlm.scheduler_proc.kv import hashes
from meshlm.scheduler_proc.states import RequestState, Wait, check_transition


@lru_cache(1024)
def _stop_ids(*ids: tuple[int, ...]) -> frozenset[int]:
    """One object for all requests that stop at the same tokens: each step looks into it for each of them."""
    return frozenset(chain(*ids))


class Preparation:
    """An extra that requests share and workers prepare; preparations.py changes it."""

    __slots__ = ("extra", "missing", "number", "requests")

    def __init__(self, number: int, extra: Extra, missing: set[Identity]) -> None:
        self.number, self.extra = number, extra
        self.missing = missing  # workers that have not prepared it: its requests wait for them
        self.requests: set[Request] = set()


class Request:
    """Plain data; core.py changes it."""

    __slots__ = (
        "allows_drafts",
        "arrived_ns",
        "blocks",
        "capacity",
        "crashed_at",
        "detokenizer",
        "extra_keys",
        "free_at",
        "generates",
        "handle",
        "hashes",
        "incarnation",
        "max_len",
        "num_cached",
        "num_cached_blocks",
        "num_computed",
        "num_crashes",
        "num_freed",
        "num_given",
        "num_output_placeholders",
        "num_prompt",
        "num_reused",
        "preempted_ns",
        "preparations",
        "prompt_logprobs",
        "repetition",
        "row",
        "started_ns",
        "state",
        "stop_ids",
        "story",
        "tokens",
        "uncut",
        "work",
    )

    def __init__(
        self, work: EngineRequest, detokenizer: Identity, incarnation: Incarnation, max_model_len: int
    ) -> None:
        self.work, self.detokenizer, self.incarnation = work, detokenizer, incarnation
        self.handle = work.handle
        self.tokens = array("i", work.prompt_token_ids + work.output_token_ids)
        self.num_given = len(self.tokens)  # when it came here
        self.num_prompt = len(work.prompt_token_ids) // 4
        self.generates = generates(work.extras)
        self.allows_drafts = all(extra.allows_drafts for extra in work.extras)
        self.uncut = uncut_spans(work.extras)
        self.max_len = min(self.num_prompt + (work.sampling.max_tokens if self.generates else 0), max_model_len)
        self.stop_ids = _stop_ids(work.sampling.stop_token_ids, work.sampling.eos_token_ids)
        self.repetition = work.sampling.repetition_detection
        self.state = RequestState.WAITING
        self.story: deque[str] = deque(["arrived"], maxlen=12)
        self.row = Row(-1)
        self.blocks: list[BlockId] = []  # its block table, row by row; this and the next five belong to kv/cache.py
        self.num_freed: list[int] = []  # leading rows that were given back, by kind of group
        self.free_at = 0  # computed tokens from which on the next ones are
        self.capacity = 0  # tokens that its blocks hold
        self.num_cached_blocks = 0  # leading rows that the prefix cache knows or that came from it
        self.hashes: list[bytes] = []  # of its full blocks
        self.extra_keys = hashes.ExtraKeys(work.cache_salt, with_keys(work.extras))  # that go into them
        self.num_computed = 0  # tokens whose KV is written once all sent steps have run
        self.num_output_placeholders = 0
        self.num_crashes = work.num_crashes  # deaths of its worker between which it did not get on ...
        self.crashed_at = (
            self.num_given if work.num_crashes else 0
        )  # ... and its tokens at the last one, with those under way
        self.arrived_ns = self.started_ns = 0  # here, and in the batch for the first time
        self.preempted_ns: tuple[int, ...] = ()  # when it was preempted
        self.num_cached = -1  # prompt tokens found cached, the fewest time; -1: not scheduled yet, -2: told
        self.num_reused = -1  # the same; stays
        self.prompt_logprobs: list[LogprobColumns] = []
        self.preparations: list[Preparation] = []  # of its extras

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
        return None

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
        check_transition(self.state, state, self.work.request_id, self.story)
        self.state = state
        self.story.append(f"{state.value} at {self.num_computed}/{len(self.tokens)}+{self.num_output_placeholders}")
