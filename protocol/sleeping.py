"""Sleep: workers that have given their device's memory back, and take it again (--enable-sleep-mode).

The scheduler says in every `Reset` which memory its workers are to be without, so that one that was started again meanwhile stays
without it, too. One that begins knows nothing, and leaves its workers as they are: they tell it.
"""

from msgspec import Struct

from meshlm.protocol.operations import Sleep, WakeUp

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class Sleeping(Struct, frozen=True, omit_defaults=True):
    """`tags`: the memory that workers are without. level 1: their weights lie in the host's memory; 2: nowhere."""

    tags: tuple[str, ...] = ()
    level: int = 0


AWAKE = Sleeping()


def after(state: Sleeping, action: Sleep | WakeUp) -> Sleeping:
    """What is asked for. Who sleeps at level 2 has no weights for level 1; once weights are there again it is level 1 that is left."""
    if isinstance(action, Sleep):
        return Sleeping(TAGS, max(state.level, action.level))
    left = tuple(tag for tag in state.tags if action.tags and tag not in action.tags)
    return Sleeping(left, state.level if WEIGHTS in left else 1) if left else AWAKE
