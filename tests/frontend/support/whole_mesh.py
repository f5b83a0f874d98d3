"""A process that prints /metrics of a mesh of which everything is known; the library's registry is one for all of a process.

Arguments: a run directory, and the number of ranks.
"""

import sys
import time

from meshlm.protocol import counts
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.counts import CountsOf, Metric, ProcessCounts
from meshlm.protocol.edges.control import GraphCounts, MeshStats, RankStats
from meshlm.protocol.wire.ids import FinishReason, Identity, Role
from meshlm.runtime.process.counts import Counts
from meshlm.runtime.process.metrics import prepare

RUNNING = 10_000


def filled(table: dict[str, Metric]) -> ProcessCounts:
    """Counts of which each has a value."""
    of_process = Counts(table)
    for name, metric in table.items():
        match metric.kind:
            case "counter":
                of_process.add(name, "first" if metric.label else "")
            case "gauge":
                of_process.gauges[name] = {"first" if metric.label else "": 0.5}
            case "histogram":
                of_process.histograms[name].observe(0.002, 3)
    return of_process.told()


def stats(num_ranks: int) -> MeshStats:
    graphs = GraphCounts({"decode": 9}, {"off": 1}, 7, {"few_tokens": 1}, halved={"mixed": 1})
    ranks = tuple(
        RankStats(
            *(
                rank,
                RUNNING // num_ranks,
                0,
                0.5,
                8,
                4,
                2,
                0,
                0,
                graphs,
                10**9,
                10**7,
                3,
                filled(dict(counts.SCHEDULER)),
            ),
            kv_cache_tokens=8192,
            kv_cache_requests=2.0,
            role="decode",
        )
        for rank in range(num_ranks)
    )
    tables = {Role.DETOKENIZER: counts.DETOKENIZER, Role.STORE: counts.STORE, Role.MEDIA: counts.MEDIA}
    others = tuple(CountsOf(Identity(role, 0), filled(dict(table))) for role, table in tables.items())
    return MeshStats(True, ranks=ranks, num_held=1, counts=others)


def main() -> None:
    run_dir, num_ranks = sys.argv[1], int(sys.argv[2])
    assert prepare(run_dir, num_ranks) == ""
    from meshlm.frontend.observe.metrics import Metrics, cache_config, exposition

    metrics, now = Metrics("m", 4096, range(num_ranks), cache_config(MeshConfig())), stats(num_ranks)
    metrics.mesh(now)
    for rank in range(num_ranks):
        engine = metrics.engine(str(rank))
        engine.ttft.observe(0.02)
        engine.prefilled(7, 4)
        engine.finished(FinishReason.STOP)
    metrics.refused("max_waiting")
    metrics.refusal.observe(0.001)
    metrics.written(1, 2_000_001)
    metrics.flush()
    times = []
    for _ in range(10):
        begin = time.process_time()
        text = exposition(now, "m")
        times.append(time.process_time() - begin)
    print(text.decode(), end="")
    print(min(times), file=sys.stderr)


if __name__ == "__main__":
    main()
