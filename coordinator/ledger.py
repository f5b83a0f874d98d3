"""What the coordinator knows of one rank: its requests, the work ahead of it, its own last word.

Plain data with sums that are kept up to date; changed by routing.py.
"""

from dataclasses import dataclass, field

from msgspec.structs import fields

from meshlm.coordinator.roles import RankRole
from meshlm.protocol.counts import ProcessCounts
from meshlm.protocol.edges.admit import Load
from meshlm.protocol.edges.control import GraphCounts, RankStats
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import Identity, Incarnation, RequestId

# The figures of a rank that stand in its Load under the same names.
OF_LOAD = {one.name for one in fields(RankStats)} & {one.name for one in fields(Load)} - {"graphs", "counts"}
KV_WEIGHT = 4000.0  # a full KV cache, in decode tokens; little until it is nearly full


@dataclass(slots=True)
class Entry:
    """One request that was dispatched here and has not ended."""

    prefill: int  # prompt tokens to compute; 0 from its first token on
    output: int  # tokens that it is taken to give
    cached: int  # prompt tokens that were thought to be in the rank's cache
    last_use: int  # of the last of those, before this request; see PrefixIndex
    pinned: bool  # the client named the rank
    attempt: int
    incarnation: Incarnation  # of its detokenizer
    given: int  # tokens that it came with
    loaded: int = 0  # prompt tokens whose KV another rank is taken to have; 0 from its first token on
    leg: RankRole = RankRole.BOTH  # the work that it came for
    left_out: int = 0  # tokens that it will give if the rank does not hand it off, and are not in `output`
    waiting: bool = True  # no token has come yet


@dataclass(slots=True, eq=False)
class Rank:
    """One incarnation of one scheduler."""

    identity: Identity
    incarnation: Incarnation
    load: Load | None = None
    graphs: GraphCounts = GraphCounts()  # as its worker said last
    counts: ProcessCounts = ProcessCounts()  # as it said last
    retiring: bool = False
    closed: bool = False  # it is its turn to change its weights (rolling.py)
    role: RankRole = RankRole.BOTH
    requests: dict[RequestId, Entry] = field(default_factory=dict)  # in the order of dispatch
    prefill_tokens: int = 0
    num_loading: int = 0  # requests whose KV comes from other ranks ...
    loading_tokens: int = 0  # ... and how much
    decode_tokens: int = 0
    unknown_tokens: int = 0  # of requests that an earlier incarnation of the coordinator dispatched
    num_unstarted: int = 0
    num_fresh: int = 0  # dispatched since its last word
    score: float = 0.0
    used: int = 0  # the number of the last dispatch that came here
    in_order: bool = False

    @property
    def number(self) -> int:
        return self.identity.index

    @property
    def serving(self) -> bool:
        return self.load is not None and self.load.serving

    @property
    def open(self) -> bool:
        return self.load is not None and self.load.serving and not self.retiring and not self.closed

    @property
    def weights(self) -> WeightsVersion | None:
        """Which its workers have, or are about to have; None: they have not said it yet."""
        return None if self.load is None else self.load.weights

    @property
    def behind(self) -> str:
        """Why they do not have those weights; empty: nothing is known against it."""
        return "" if self.load is None else self.load.behind

    @property
    def kv_pressure(self) -> float:
        """Share of KV blocks in use, 0 .. 1."""
        if self.load is None or not self.load.num_blocks:
            return 0.0
        return 1.0 - self.load.num_free_blocks / self.load.num_blocks

    @property
    def kv_tokens(self) -> int:
        """The number of tokens that the rank's KV cache holds."""
        return self.load.num_blocks * self.load.block_size if self.load is not None else 0

    @property
    def room(self) -> int:
        """The number of tokens that a new request may bring and be computed at once; 0 while others wait for room."""
        load = self.load
        if not self.open or load is None or load.num_waiting > self.num_loading:
            return 0
        return load.num_free_blocks * load.block_size - self.prefill_tokens - self.loading_tokens

    def takes_at_once(self, num_tokens: int, places: int) -> bool:
        """Whether a request of so many tokens would begin there without a wait, where `places` requests run at a time."""
        if self.load is None or self.room < num_tokens:
            return False
        return self.load.num_running + self.num_fresh < places

    def waiting(self, places: int) -> int:
        """Requests in its queue, of which `places` run at a time; those that it has not spoken of since take free places first."""
        load = self.load
        if load is None:
            return 0
        return load.num_waiting + max(0, self.num_fresh - max(0, places - load.num_running))

    def stats(self, first_rank: int) -> RankStats:
        """The rank's figures for /metrics, once it has reported."""
        assert self.load is not None
        return RankStats(
            **{name: getattr(self.load, name) for name in OF_LOAD},
            dp_rank=first_rank + self.number,
            kv_cache_usage=self.kv_pressure,
            graphs=self.graphs,
            incarnation=self.incarnation,
            counts=self.counts,
            role="" if self.role is RankRole.BOTH else self.role.value,
        )

    @property
    def idle(self) -> bool:
        """Nothing is there, by its own word and by the ledger."""
        load = self.load
        return not self.requests and load is not None and not load.num_running and not load.num_waiting

    def add(self, request_id: RequestId, entry: Entry) -> None:
        self.remove(request_id)
        self.requests[request_id] = entry
        self.prefill_tokens += entry.prefill
        self.loading_tokens += entry.loaded
        self.num_loading += entry.loaded > 0
        self.decode_tokens += entry.output
        self.num_unstarted += 1
        self.num_fresh += 1

    def started(self, request_id: RequestId) -> Entry | None:
        entry = self.requests.get(request_id)
        if entry is None or not entry.waiting:
            return None
        self.prefill_tokens -= entry.prefill
        self.loading_tokens -= entry.loaded
        self.num_loading -= entry.loaded > 0
        self.num_unstarted -= 1
        self.decode_tokens += entry.left_out
        entry.prefill, entry.loaded, entry.waiting = 0, 0, False
        entry.output, entry.left_out = entry.output + entry.left_out, 0
        return entry

    def remove(self, request_id: RequestId) -> None:
        entry = self.requests.pop(request_id, None)
        if entry is not None:
            self.prefill_tokens -= entry.prefill
            self.loading_tokens -= entry.loaded
            self.num_loading -= entry.loaded > 0
            self.decode_tokens -= entry.output
            self.num_unstarted -= entry.waiting

    def work(self, prefill_weight: float) -> float:
        """The work ahead of the rank, in decode tokens."""
        generated = self.load.live_tokens if self.load is not None else 0
        # A request that runs has a token to come at least.
        decode = max(self.decode_tokens + self.unknown_tokens - generated, len(self.requests))
        return prefill_weight * self.prefill_tokens + decode + KV_WEIGHT * self.kv_pressure**4

    def check(self) -> None:
        entries = self.requests.values()
        assert self.prefill_tokens == sum(entry.prefill for entry in entries)
        assert self.loading_tokens == sum(entry.loaded for entry in entries)
        assert self.num_loading == sum(entry.loaded > 0 for entry in entries)
        assert self.decode_tokens == sum(entry.output for entry in entries)
        assert self.num_unstarted == sum(entry.waiting for entry in entries)
