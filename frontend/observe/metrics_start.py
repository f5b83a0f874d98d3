"""The series of a frontend's /metrics, begun once the directory is known in which all frontends share them. Called by io.py."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.control import MeshStats
from meshlm.runtime.process import metrics as shared_metrics

if TYPE_CHECKING:
    from meshlm.frontend.observe.metrics import Metrics

SERIES_FROM_START = 16  # engines whose series are there before their first request
Scrape = Callable[[MeshStats, str], Awaitable[bytes]]


def begun(config: MeshConfig, resolved: Resolved, log: Any) -> "tuple[Metrics, Scrape]":
    """The series, and what writes those of all frontends."""
    parallel = config.parallel
    if why := shared_metrics.prepare(config.run.run_dir, parallel.data_parallel_size):
        log.warning("metrics are of this frontend alone", reason=why)
    from meshlm.frontend.observe import metrics  # after the directory is set

    first = parallel.data_parallel_rank or 0
    engines = range(first, first + min(parallel.data_parallel_size, SERIES_FROM_START))
    named, most = resolved.served_names[0], resolved.max_model_len
    return metrics.Metrics(named, most, engines, metrics.cache_config(config)), metrics.scrape
