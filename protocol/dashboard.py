"""The events of GET /dashboard/events and the answer of GET /dashboard/history: what an operator sees of the mesh.

A frontend makes them (frontend/dashboard/), the page and `meshlm top` show them. Rates are of the last seconds.
"""

from msgspec import Struct


class ProcessView(Struct, frozen=True):
    """One process, or one that waits for a place."""

    name: str  # role/index; of a standby the role alone
    node: str  # "" in a mesh of one node
    state: str
    pid: int
    uptime_s: float
    restarts: int
    phase: str
    rss_bytes: int


class EdgeView(Struct, frozen=True):
    """One direction of a link."""

    source: str
    target: str
    per_s: float  # messages


class RankView(Struct, frozen=True):
    """One data-parallel rank: a scheduler and its workers."""

    rank: int
    running: int
    waiting: int
    waiting_for: dict[str, int]  # how many of these for what, as in num_requests_waiting_by_reason
    kv_usage: float  # 0 .. 1
    kv_pages: dict[str, int]  # by state: used, cached, empty
    kv_groups: dict[str, int]  # pages that running requests hold, by KV group
    hit_rate: float  # of the prefix cache, 0 .. 1, of all prompt tokens so far
    preemptions: int
    prompt_per_s: float  # tokens
    generated_per_s: float  # tokens
    busy: float  # share of the time with requests in which the device computed, 0 .. 1
    # mean seconds of a step's hops in the last seconds, in their order; those that were not seen are absent
    step: dict[str, float]
    # tokens that each rank's experts had in the last window (--enable-eplb); () without any
    expert_loads: tuple[int, ...]
    accepted: float | None  # share of the drafted tokens of the last seconds, 0 .. 1; None: none were drafted
    accepted_len: float | None  # tokens of a step that had drafts, in the mean
    role: str = ""  # prefill or decode (--dp-roles); "": the ranks have no roles
    hand_offs: int = 0  # requests that it gave to a rank that decodes


class TierView(Struct, frozen=True):
    """One tier of the store of KV pages. Keys are counted since the store was started."""

    name: str  # memory, disk
    used_bytes: int
    capacity_bytes: int  # 0: nobody has said
    hits: int
    stored: int
    evicted: int
    paused: bool  # it fails, and nothing is written there


class StoreView(Struct, frozen=True):
    """The store of KV pages, which a mesh may have."""

    process: str
    hit_rate: float  # share of the keys that were asked for, 0 .. 1
    ceiling: float  # ... that a store without any bound would have had
    tiers: tuple[TierView, ...]


class Percentiles(Struct, frozen=True):
    """Times of the last minute, in seconds; 0 where there were none."""

    count: int
    p50: float
    p90: float
    p99: float


class RequestView(Struct, frozen=True, omit_defaults=True):
    """One HTTP request and where its time went. A hop that it has not passed yet is absent; the last one of a request that runs is
    where it is now."""

    id: str
    path: str
    at_s: float  # wall clock, when it was submitted
    seconds: float  # from then to its end, or until now
    hops: dict[str, float]  # seconds by hop, in their order
    status: int = 0  # HTTP's; 0: it runs
    rank: str = ""
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_attempts: int = 1  # more where a detokenizer died
    finish_reason: str = ""
    error: str = ""
    frontend: str = ""  # which has its client; "": the one that tells


class NewsView(Struct, frozen=True):
    """A line that the supervisor told its user."""

    at_s: float
    level: str
    text: str


class Snapshot(Struct, frozen=True):
    """One event."""

    number: int
    at_s: float  # wall clock
    frontend: str  # which tells this
    version: str
    model: str
    serving: bool
    reason: str  # while it does not serve: what is missing
    paused: bool
    blocked: str  # a link on which nothing moves
    missing: str  # ranks or workers that are on no node
    num_held: int  # requests that wait for a rank that serves
    num_open: int  # HTTP requests of all frontends
    num_watchers: int
    prompt_per_s: float
    generated_per_s: float
    ttft: Percentiles
    itl: Percentiles
    processes: tuple[ProcessView, ...]
    standbys: tuple[ProcessView, ...]
    edges: tuple[EdgeView, ...]
    ranks: tuple[RankView, ...]
    stores: tuple[StoreView, ...]
    running: tuple[RequestView, ...]  # the oldest ones
    num_ended: int  # requests that the frontends have answered, as far as this one knows
    ended: tuple[RequestView, ...]  # since the event before
    news: tuple[NewsView, ...]  # of the last seconds: a client that gets few events has each of them in one at least


class History(Struct, frozen=True):
    """What came before the events: the last requests of all frontends and the last news, the newest last."""

    num_ended: int
    requests: tuple[RequestView, ...]
    news: tuple[NewsView, ...]
