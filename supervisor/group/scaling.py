"""A change of the number of ranks: what it means for the processes, and how far it is. Pure; owned by io.py.

One at a time. Ranks are numbered from 0: the highest go and come. The group (core.py) does the work.
"""

from collections.abc import Callable

from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.changing import with_num_ranks
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.settings import parallel as sizes
from meshlm.supervisor.settings import rules
from meshlm.supervisor.settings.rules import Rules

MAX_RANKS = 1024


class Change(Struct, frozen=True):
    """Either some are added or some removed."""

    config: MeshConfig  # after it
    added: tuple[Identity, ...]
    removed: tuple[Identity, ...]
    drain_s: float


def _refused(c: MeshConfig, num_ranks: object, drain_s: object) -> Rules:
    """What is wrong with a change to so many ranks."""
    is_number = isinstance(num_ranks, int) and not isinstance(num_ranks, bool) and 1 <= num_ranks <= MAX_RANKS
    yield not is_number, f"--dp {num_ranks}", f"a number of ranks from 1 to {MAX_RANKS}"
    is_time = isinstance(drain_s, int | float) and 0 <= drain_s <= 86400
    yield not is_time, f"--drain-timeout {drain_s}", "seconds from 0 to 86400"
    outer = c.parallel.data_parallel_external_lb or c.parallel.data_parallel_hybrid_lb
    yield outer, "--dp", "this mesh has its numbers behind an outer balancer; start or end another mesh instead"
    why = "this mesh has several nodes; start or end a node with --headless --join instead"
    yield c.node is not None, "--dp", why
    renders = c.resolved is not None and c.resolved.renders_only
    yield renders, "--dp", "this mesh renders alone; it has no ranks"
    num_prefill = c.kv_transfer.num_prefill_ranks
    few = isinstance(num_ranks, int) and 0 < num_prefill >= num_ranks
    why = (
        f"a rank has to decode beside those for prompts ({c.kv_transfer.dp_roles}); `meshlm set dp-roles` changes that"
    )
    yield few, f"--dp {num_ranks}", why
    why = "the ranks of this mesh share experts and step together; their number is fixed, since each has loaded its share of the "
    yield c.lockstep, "--dp", f"{why}experts for it"


class Scaling:
    """`identities` tells which processes a configuration has."""

    def __init__(self, identities: Callable[[MeshConfig], list[Identity]]) -> None:
        self.doing = ""  # in words; "" when nothing is under way
        self.failed = ""  # why the last change was undone
        self._identities = identities
        self._before: MeshConfig | None = None
        self._config: MeshConfig | None = None  # that has all ranks that are there

    def begin(self, config: MeshConfig, num_ranks: object, drain_s: object) -> Change | None:
        """The change to make; None for none. UsageError when it cannot be made."""
        rules.check(_refused(config, num_ranks, drain_s))
        assert isinstance(num_ranks, int)
        assert isinstance(drain_s, int | float)
        before = config.parallel.data_parallel_size
        self.failed = ""
        if num_ranks == before:
            return None
        after = with_num_ranks(config, num_ranks)
        parallel = after.parallel
        if config.resolved is not None:
            here, whole_experts = num_ranks * parallel.workers_per_rank, config.experts.enable_expert_parallel
            sizes.check(parallel, config.resolved.spec, config.resolved.device, here, whole_experts=whole_experts)
        old, new = self._identities(config), self._identities(after)
        self._before = config
        self._config = config if num_ranks < before else after
        first, last = min(before, num_ranks), max(before, num_ranks) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        self.doing = f"{'adding' if num_ranks > before else 'removing'} {ranks}"
        added = tuple(identity for identity in new if identity not in old)
        removed = tuple(identity for identity in old if identity not in new)
        return Change(after, added, removed, float(drain_s))

    def under_way(self) -> tuple[str, MeshConfig, MeshConfig] | None:
        """A change that has not ended: in words, the configuration before it, and the one that has all ranks that are there."""
        return (
            (self.doing, self._before, self._config) if self._before is not None and self._config is not None else None
        )

    def go_on(self, doing: str, before: MeshConfig, with_all: MeshConfig) -> None:
        """With a change that another supervisor began."""
        self.doing, self._before, self._config = doing, before, with_all

    def end(self, failure: str) -> MeshConfig | None:
        """The change is done, or undone; the configuration before it."""
        self.doing, self.failed = "", failure
        before, self._before = self._before, None
        return before

    def of_rank(self, dp_rank: int) -> tuple[Identity, ...]:
        """The processes of one rank: those that are there with it and not without it."""
        if self._config is None:
            return ()
        found = [i for i in self._identities(self._config) if i.role in (Role.SCHEDULER, Role.WORKER)]
        num_workers = sum(identity.role is Role.WORKER for identity in found)
        per_rank = num_workers // max(1, len(found) - num_workers)
        scheduler = Identity(Role.SCHEDULER, dp_rank)
        if scheduler not in found:
            return ()
        return (scheduler, *(Identity(Role.WORKER, dp_rank * per_rank + index) for index in range(per_rank)))
