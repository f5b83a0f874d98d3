"""The time that the process group goes by (io.py, core.py)."""

import time
from collections.abc import Callable


def steady() -> Callable[[], float]:
    """Seconds since the epoch as they were told now, and from then on without the jumps of a clock that is set: incarnations grow from
    one supervisor to the next, and no restart or deadline waits for a clock that went back."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
