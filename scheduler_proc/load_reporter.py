"""What the coordinator has not heard yet of this rank: which requests began, ended or are given back, and the counts of a Load.

Pure; owned by core.py, which says what happened. Each request is named once; counts are said anew whenever a Load is due.
"""

import msgspec

from meshlm.protocol.edges.admit import EngineRequest, Load, Returned, Started
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.sleeping import AWAKE
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import Identity, Incarnation, RequestId
from meshlm.scheduler_proc.batching import Batching
from meshlm.scheduler_proc.batching_counts import outstanding_prefill
from meshlm.scheduler_proc.states import RankState


class LoadReporter:
    """Since the last Load; the token counts are of this scheduler's whole life."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self.ended: list[RequestId] = []
        self.started: list[Started] = []
        self.returned: list[Returned] = []
        self.live_tokens = 0  # that requests which have not ended got here
        self.prompt_tokens = self.generation_tokens = self.num_hand_offs = 0
        self.busy_ns = self.idle_ns = 0  # of the device; idle although requests were running
        self.graphs: GraphCounts | None = None  # its worker's, that the coordinator does not know
        self.answers = 0  # the number of the coordinator's newest ReportLoad
        self.sleeping = AWAKE
        self.weights: tuple[WeightsVersion | None, str] = (None, "")  # of its workers, and why they have no others
        self._graphs: GraphCounts | None = None  # the last ones
        self._last: Load | None = None
        self._tells_counts = True

    def give_back(self, work: EngineRequest, detokenizer: Identity, incarnation: Incarnation, num_crashes: int) -> None:
        """It has not ended: it goes on elsewhere."""
        one = Returned(work.request_id, work.attempt, work.handle, detokenizer, incarnation, num_crashes)
        self.returned.append(one)

    def hand_off(self, work: EngineRequest, detokenizer: Identity, incarnation: Incarnation) -> None:
        """Its prompt is computed, and it goes on at a rank that decodes."""
        one = Returned(work.request_id, work.attempt, work.handle, detokenizer, incarnation, handed_off=True)
        self.returned.append(one)
        self.num_hand_offs += 1

    def tell_all(self) -> None:
        """The next Load is due even without change."""
        self._last, self._tells_counts = None, True

    def begin(self) -> None:
        """The coordinator is another one, or the same again: it may know nothing."""
        self.tell_all()
        self.graphs, self.answers = self._graphs, 0

    def asked(self, number: int) -> None:
        self.answers = number
        self.tell_all()

    def worker(self, graphs: GraphCounts, incarnation: Incarnation) -> None:
        """The counts of this incarnation of a worker: with the next Load, at the next Tick at the latest."""
        self.graphs = self._graphs = msgspec.structs.replace(graphs, incarnation=incarnation)

    def load(self, batching: Batching, serving: bool, num_steps: int) -> Load | None:
        """Due when a request ended, began or changed queues; the rest can wait for the next tick."""
        last = self._last
        counts = (batching.num_running, len(batching.waiting), serving)
        news = self.ended or self.returned or self.started
        if last is not None and not news and counts == (last.num_running, last.num_waiting, last.serving):
            return None
        if self._tells_counts:
            batching.count()
        self._last = load = Load(
            num_running=counts[0],
            num_waiting=counts[1],
            num_blocks=batching.kv.num_blocks,
            num_free_blocks=batching.kv.free_blocks,
            outstanding_prefill_tokens=outstanding_prefill(batching.running, batching.waiting),
            ended=tuple(self.ended),
            steps=num_steps,
            prefix_cache_queries=batching.cache_queries,
            prefix_cache_hits=batching.cache_hits,
            num_preemptions=batching.num_preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            serving=serving,
            block_size=batching.block_size,
            live_tokens=self.live_tokens,
            started=tuple(self.started),
            returned=tuple(self.returned),
            graphs=self.graphs,
            busy_ns=self.busy_ns,
            idle_ns=self.idle_ns,
            answers=self.answers,
            paused=self._rank.paused,
            sleeping=self.sleeping,
            kv_cache_tokens=batching.most_tokens,
            kv_cache_requests=batching.most_requests,
            num_hand_offs=self.num_hand_offs,
            weights=self.weights[0],
            behind=self.weights[1],
            counts=batching.counts.told() if self._tells_counts else None,
        )
        self._tells_counts = False
        self.ended, self.returned, self.started, self.graphs = [], [], [], None
        return load
