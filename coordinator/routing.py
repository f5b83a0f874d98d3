"""Which rank takes a request: the ledger of each rank's load, and the score.

Pure. The ledger is event-sourced: dispatch and the end of a request adjust it at once; a rank's own Load only corrects it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshlm.protocol.admit_edge import Load, SchedulerLife
from meshlm.protocol.ids import Identity, Incarnation, RequestId

DECODE_WEIGHT = 1.0  # one outstanding decode token costs about as much as ...
PREFILL_WEIGHT = 0.1  # ... ten prompt tokens to be computed
KV_WEIGHT = 2000.0  # a full KV cache, in decode tokens


@dataclass(slots=True)
class Rank:
    """One scheduler as the coordinator sees it."""

    identity: Identity
    incarnation: Incarnation
    load: Load | None = None
    requests: dict[RequestId, tuple[int, int]] = field(default_factory=dict)  # id -> (prompt tokens, max output tokens)
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def serving(self) -> bool:
        return self.load is not None and self.load.serving

    @property
    def life(self) -> SchedulerLife:
        return SchedulerLife(self.identity, self.incarnation)

    def add(self, request_id: RequestId, prompt: int, output: int) -> None:
        self.requests[request_id] = (prompt, output)
        self.prefill_tokens += prompt
        self.decode_tokens += output

    def remove(self, request_id: RequestId) -> None:
        entry = self.requests.pop(request_id, None)
        if entry is not None:
            self.prefill_tokens -= entry[0]
            self.decode_tokens -= entry[1]

    @property
    def kv_pressure(self) -> float:
        """Share of KV blocks in use, 0 .. 1."""
        if self.load is None or not self.load.num_blocks:
            return 0.0
        return 1.0 - self.load.num_free_blocks / self.load.num_blocks

    def score(self) -> float:
        """Less is better."""
        return PREFILL_WEIGHT * self.prefill_tokens + DECODE_WEIGHT * self.decode_tokens + KV_WEIGHT * self.kv_pressure


def choose(ranks: Iterable[Rank], wanted: int = -1, lost: Iterable[SchedulerLife] = ()) -> Rank | None:
    """The rank for a request: the wanted one, or the least loaded; never one that is `lost`. None when none serves."""
    over = {life.scheduler: life.incarnation for life in lost}
    candidates = [
        rank
        for rank in ranks
        if rank.serving
        and wanted in (-1, rank.identity.index)
        and rank.incarnation > over.get(rank.identity, Incarnation(0))
    ]
    return min(candidates, key=lambda rank: (rank.score(), rank.identity.index), default=None)
