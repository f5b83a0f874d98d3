"""The settings of the prefix cache's events, which schedulers publish for routers."""

from typing import Annotated

from msgspec import Meta, Struct

from meshlm.protocol.kv_events import Encoding


class KVEventsConfig(Struct, frozen=True, kw_only=True):
    """A flag, and below it what it comes to. Keys and defaults are vLLM's."""

    kv_events_config: Annotated[
        str,
        Meta(
            description="events of the prefix cache for routers, a JSON object: enable_kv_cache_events, endpoint, ... as vLLM's"
        ),
    ] = ""

    # Set by the supervisor before any child starts (supervisor/settings/kv_events.py); none of these is a flag.
    enabled: bool = False
    endpoint: str = "tcp://*:5557"  # of rank 0; that of rank n is n ports higher
    replay_endpoint: str = ""  # likewise; empty: nobody can ask for what it missed
    buffer_steps: int = 10_000  # batches that are kept for that
    hwm: int = 100_000  # batches that wait for one subscriber at most; it misses those behind
    max_queue_size: int = 100_000  # batches that wait at most while subscribers of an earlier scheduler come back
    topic: str = ""
    encoding: Encoding = "map"
