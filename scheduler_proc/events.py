"""What the core is told and what it answers."""

from msgspec import Struct

from meshlm.protocol.ids import Identity, Incarnation


class Received(Struct, frozen=True):
    """A message of a peer."""

    sender: Identity
    incarnation: Incarnation
    message: Struct


class PeerUp(Struct, frozen=True):
    """A session with this life of a peer begins."""

    identity: Identity
    incarnation: Incarnation


class PeerLost(Struct, frozen=True):
    """This life of a peer is over."""

    identity: Identity
    incarnation: Incarnation


class Tick(Struct, frozen=True):
    """Once a second; `wall_s` is the wall clock, for deadlines."""

    wall_s: float


Event = Received | PeerUp | PeerLost | Tick


class Send(Struct, frozen=True):
    """Send `message` to `to`."""

    to: Identity
    message: Struct


MAX_CRASHES = 4  # fewer than the default of --max-restarts


class Limits(Struct, frozen=True, kw_only=True):
    """What the configuration allows this rank."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_depth: int = 2
    chunked_prefill: bool = True
    even_prefill: bool = True
    prefix_caching: bool = True
    by_priority: bool = False
    num_workers: int = 1
    first_worker: int = 0
    max_crashes: int = MAX_CRASHES  # of workers under a request that got no token between them
    dp_rank: int = 0  # its number, as clients know it
    num_stages: int = 1  # of the pipeline: so many steps are in flight, each with requests of its own
