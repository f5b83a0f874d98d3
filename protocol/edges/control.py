"""everyone <-> supervisor and everyone <-> coordinator: life, death and membership.

The supervisor knows processes (pids, restarts); the coordinator knows members (who may be talked to, at which address).
"""

from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.changing import changed, with_num_ranks
from meshlm.protocol.counts import CountsOf, ProcessCounts
from meshlm.protocol.dashboard import RequestView
from meshlm.protocol.sleeping import AWAKE, Sleeping
from meshlm.protocol.timeline import RecordTimeline, TimelinePart
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import Epoch, Identity, Incarnation, Role


class Progress(Struct, frozen=True, tag="progress"):
    """Start-up news for the terminal: phase "weights" 12/100 "MB", "KV blocks", "graphs" ..."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


class Ready(Struct, frozen=True, tag="ready"):
    """This process does its job from now on. `facts` are shown to the user ("KV cache: 9,000 blocks")."""

    facts: dict[str, str] = {}


class Failed(Struct, frozen=True, tag="failed"):
    """This process cannot go on, in the words that the user should read last. fits: tokens of a context that there would be room for,
    with --max-model-len auto; 0: that is not why."""

    message: str
    fits: int = 0


STEPPING = "stepping"  # the phase of a Heartbeat in which `step` must move on


class Heartbeat(Struct, frozen=True, tag="beat"):
    """Twice a second, from the event loop; `step` and `phase` are as the threads that work left them: alive, or stuck."""

    step: int
    phase: str
    rss_bytes: int = 0
    sent: dict[str, int] = {}  # messages in the present session of each open link, by the peer's name


class RankDrained(Struct, frozen=True, tag="rank_drained"):
    """The coordinator's word: nothing is left at this rank, which was to be removed. Said every second until it is gone."""

    dp_rank: int


class Died(Struct, frozen=True, tag="died"):
    """A process is gone (seen by its host's pidfd). Drop its link at once."""

    identity: Identity
    incarnation: Incarnation
    in_hand: tuple[str, ...] = ()  # the requests that it worked on then, by name (runtime/process/in_hand.py)


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Refuse new work, finish what is running for up to drain_s, then end."""

    drain_s: float
    handover: bool = False  # to a frontend: others take the new connections; serve what comes on those that are open


class Supervised(Struct, frozen=True, tag="supervised"):
    """The process `pid` of this host watches over the receiver, and will be outlived: when it is gone the receiver serves on for
    `grace_s`, until another one says so, and is ended then. Said in each session once all processes were ready."""

    pid: int
    grace_s: float


class Refuse(Struct, frozen=True, tag="refuse"):
    """To a frontend: from now on new requests get 503 (`meshlm drain`), or are taken again."""

    on: bool


class OpenRequests(Struct, frozen=True, tag="open_requests"):
    """A frontend's answer to Refuse, and again with each request that ends."""

    num_open: int


class SetRanks(Struct, frozen=True, tag="set_ranks"):
    """To the coordinator and to frontends: the mesh has this many ranks from now on. Those from there on get no more requests and are
    drained."""

    num_ranks: int

    def applied(self, config: MeshConfig) -> MeshConfig:
        """The configuration with this number."""
        return with_num_ranks(config, self.num_ranks)


class NodeJoin(Struct, frozen=True, tag="node_join"):
    """The supervisor of another node asks the head whether its processes may join; again in each new session."""

    host: str  # for people
    ranks: tuple[int, int]  # first and number of its schedulers
    workers: tuple[int, int]
    facts: dict[str, str]  # what all nodes must have in common, by the name that a user knows it by


class NodeWelcome(Struct, frozen=True, tag="node_welcome"):
    """It may start its processes."""


class NodeRefused(Struct, frozen=True, tag="node_refused"):
    """It must end, with these words."""

    message: str


class ProcessReport(Struct, frozen=True):
    """One process of another node, as its supervisor sees it."""

    identity: Identity
    incarnation: Incarnation
    pid: int
    state: str
    started_s: float  # wall clock
    restarts: int
    phase: str = ""
    rss_bytes: int = 0
    host: str = ""  # in a mesh of several nodes
    sent: dict[str, int] = {}  # as in Heartbeat


class StandbyReport(Struct, frozen=True):
    """One process of a node that waits for a place."""

    role: Role
    pid: int
    state: str
    started_s: float  # wall clock
    rss_bytes: int = 0


class AskProcesses(Struct, frozen=True, tag="ask_processes"):
    """A frontend's dashboard is watched: send it MeshProcesses."""

    news_since_s: float = 0.0  # the wall clock of the newest that it has


class News(Struct, frozen=True, array_like=True):
    """A line that the supervisor told its user."""

    at_s: float  # wall clock
    level: str
    text: str


class MeshProcesses(Struct, frozen=True, tag="mesh_processes"):
    """All processes of the mesh, as `meshlm status` has them, and the newest news of them."""

    processes: tuple[ProcessReport, ...]
    standbys: tuple[StandbyReport, ...] = ()
    news: tuple[News, ...] = ()  # later than `news_since_s`, the oldest first
    missing: str = ""  # ranks or workers that are on no node


class AskRequests(Struct, frozen=True, tag="ask_requests"):
    """A frontend's dashboard is watched: send it FrontendRequests. From that frontend to the supervisor, from there to the others."""

    since_s: dict[str, float] = {}  # by frontend: `until_s` of its last answer
    asker: Identity | None = None  # as the supervisor knows it


class FrontendRequests(Struct, frozen=True, tag="frontend_requests"):
    """The requests of one frontend, for the dashboard of another one, by way of the supervisor."""

    frontend: str
    asker: Identity
    since_s: float  # what was asked for
    until_s: float  # wall clock at which the newest one ended, or since_s
    num_ended: int  # since it was started
    ended: tuple[RequestView, ...]  # later than since_s, the oldest first
    running: tuple[RequestView, ...]  # the oldest ones
    num_open: int = 0
    ttft: dict[int, int] = {}  # of the last minute, by frontend/dashboard/snapshot.py's buckets
    itl: dict[int, int] = {}


class ChangeSettings(Struct, frozen=True, tag="change_settings"):
    """Settings that may change while the mesh runs (config/changing.py), by name, as they are from now on. From the supervisor to its
    processes and to other nodes' supervisors; from a frontend, whose operator asked for it, to the supervisor."""

    values: dict[str, str | int | float]

    def applied(self, config: MeshConfig) -> MeshConfig:
        """The configuration with these values. ValueError for one that is not right."""
        return changed(config, self.values)


class ScaleRanks(Struct, frozen=True, tag="scale_ranks", omit_defaults=True):
    """A frontend, whose operator asked for it, to the supervisor: have `num_ranks` ranks, and answer when that is done. None: answer
    how many there are."""

    id: str
    num_ranks: int | None = None
    drain_s: float | None = None  # as in `meshlm scale`; None: the mesh's


class RanksScaled(Struct, frozen=True, tag="ranks_scaled", omit_defaults=True):
    """The answer to ScaleRanks."""

    id: str
    num_ranks: int
    doing: str = ""  # the change that is under way, in words
    refused: str = ""  # why no change was begun
    failed: str = ""  # why it was undone


ChildToSupervisor = Progress | Ready | Failed | Heartbeat | RankDrained | OpenRequests | TimelinePart
DashboardToSupervisor = AskProcesses | AskRequests | FrontendRequests
OperatorToSupervisor = ChangeSettings | ScaleRanks
SupervisorToDashboard = MeshProcesses | AskRequests | FrontendRequests
SupervisorToChild = Died | Shutdown | Supervised | SetRanks | Refuse | ChangeSettings | RecordTimeline


class NodeReport(Struct, frozen=True, tag="node_report"):
    """Once a second."""

    processes: tuple[ProcessReport, ...]
    standbys: tuple[StandbyReport, ...] = ()


class RestartProcesses(Struct, frozen=True, tag="restart_processes"):
    """The head asks a node to replace these of its processes, one after the other. RestartNews follow."""

    identities: tuple[Identity, ...]


class RestartNews(Struct, frozen=True, tag="restart_news"):
    """Tells how a restart of processes goes. `failure` is "" when it is over and all were replaced."""

    lines: tuple[str, ...] = ()  # for the user
    over: bool = False
    failure: str = ""


SupervisorToSupervisor = (
    NodeJoin
    | NodeWelcome
    | ChangeSettings
    | NodeRefused
    | NodeReport
    | Died
    | Shutdown
    | RestartProcesses
    | RecordTimeline
    | TimelinePart
    | RestartNews
)


class Member(Struct, frozen=True):
    """One living process: where to reach its inbox, and whether it does its job yet."""

    identity: Identity
    incarnation: Incarnation
    address: str  # for processes of its node
    ready: bool = False
    tcp: str = ""  # for processes of other nodes; empty: none can reach it
    node: str = ""


class Join(Struct, frozen=True, tag="join"):
    """Sent to each new incarnation of the coordinator, and again when `ready` changes."""

    member: Member


class Leave(Struct, frozen=True, tag="leave"):
    """This process ends in good order and takes no new work."""


class Members(Struct, frozen=True, tag="members"):
    """The whole list, sent to all on each change. An older epoch of the same coordinator incarnation is ignored."""

    epoch: Epoch
    members: tuple[Member, ...]


class GraphCounts(Struct, frozen=True, omit_defaults=True):
    """Steps of a worker since its start: replayed from a CUDA graph, by kind of graph, and launched kernel by kernel, by reason."""

    replays: dict[str, int] = {}
    misses: dict[str, int] = {}
    incarnation: int = 0  # of the worker; its scheduler adds it
    whole: dict[str, int] = {}  # steps that were not halved with --enable-dbo, by reason
    # Tokens that the experts of each rank had in the last window that was looked at (--enable-eplb), over all layers.
    expert_loads: tuple[int, ...] = ()
    halved: dict[str, int] = {}  # steps whose halves took turns, by kind


class RankStats(Struct, frozen=True, omit_defaults=True):
    """One scheduler's figures for /metrics."""

    dp_rank: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 .. 1
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    graphs: GraphCounts = GraphCounts()
    busy_ns: int = 0  # as in Load
    idle_ns: int = 0
    incarnation: int = 0  # of the scheduler, whose counts begin at 0 with it
    counts: ProcessCounts = ProcessCounts()
    sleeping: Sleeping = AWAKE
    kv_cache_tokens: int = 0
    kv_cache_requests: float = 0.0
    role: str = ""  # prefill or decode; "": the ranks have no roles
    weights: WeightsVersion | None = None  # that its workers have; None: not known yet ...
    behind: str = ""  # ... and why they are not the mesh's
    num_hand_offs: int = 0


class QueueFull(Struct, frozen=True, tag="queue_full"):
    """To every frontend: the mesh's queue is full, refuse new requests at the door; or it is not full any more.

    Said when a request had to be refused and when there is room again, a hundred times a second at most, and while it is full once
    a second. A frontend without a coordinator forgets it."""

    on: bool


class Blocked(Struct, frozen=True, tag="blocked"):
    """To the coordinator: on a link of this process one frame is sent again and again, and nothing else; "": no longer."""

    reason: str


class AskStats(Struct, frozen=True, tag="ask_stats"):
    """A frontend's /metrics is read: send it a MeshStats with `asked`, after all that its clients have been told."""


class MeshStats(Struct, frozen=True, tag="stats"):
    """To every frontend, once a second and when `serving` changes: what /ready and /metrics answer. And to one that asked."""

    serving: bool
    reason: str = ""  # while not serving: what is missing
    ranks: tuple[RankStats, ...] = ()
    num_held: int = 0  # requests that wait in the coordinator for a rank that serves
    asked: bool = False  # it answers AskStats
    blocked: str = ""  # a link of any process on which nothing moves
    paused: bool = False  # as an operator wants it
    counts: tuple[CountsOf, ...] = ()  # of processes that are no schedulers
    weights: WeightsVersion = WeightsVersion()  # that all ranks are to have
    updating: str = ""  # what is being done to them
