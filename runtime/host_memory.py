"""How much of a host's memory the KV cache of a CPU worker may have. Asked by workers, and by `meshlm serve --dry-run`."""

import os

CPU_SHARE = 0.25  # of the memory that is free now
CPU_MOST = 4 << 30


def cpu_budget() -> int:
    """Bytes for the KV cache of a CPU worker that was not told."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_SHARE), CPU_MOST)
