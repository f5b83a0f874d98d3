"""--numa-bind: what is asked for is there, or refused by name; a process that is bound stays where it is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshlm.protocol.config import MeshConfig, WorkerConfig
from meshlm.runtime.process import numa


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, cpus in enumerate(("0-1,4", "2-3")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    return tmp_path


def test_nodes(two_nodes: Path) -> None:
    assert numa.nodes(two_nodes) == {0: {0, 1, 4}, 1: {2, 3}}


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(numa.NumaError, match="list of CPUs"):
        numa.parse_cpus(text)


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        (WorkerConfig(numa_bind=True, numa_bind_nodes=(0, 2)), "--numa-bind-nodes 2: this host has the nodes 0, 1"),
        (WorkerConfig(numa_bind=True, numa_bind_nodes=(0,)), "--numa-bind-nodes: 1 are given, and this node has 2"),
        (WorkerConfig(numa_bind=True, numa_bind_cpus=("0", "9")), "--numa-bind-cpus 9: this host has no CPU 9"),
        (WorkerConfig(numa_bind_nodes=(0, 1)), "they go with --numa-bind"),
    ],
)
def test_what_is_refused(two_nodes: Path, worker: WorkerConfig, says: str) -> None:
    with pytest.raises(numa.NumaError, match=says):
        numa.check(MeshConfig(worker=worker), 2, two_nodes)


def test_a_system_that_tells_no_nodes(tmp_path: Path) -> None:
    with pytest.raises(numa.NumaError, match="tells no NUMA nodes"):
        numa.check(MeshConfig(worker=WorkerConfig(numa_bind=True)), 1, tmp_path)


def test_what_fits(two_nodes: Path) -> None:
    numa.check(MeshConfig(), 2, two_nodes)
    numa.check(MeshConfig(worker=WorkerConfig(numa_bind=True)), 2, two_nodes)
    worker = WorkerConfig(numa_bind=True, numa_bind_nodes=(0, 0), numa_bind_cpus=("0-1", "4"))
    numa.check(MeshConfig(worker=worker), 2, two_nodes)


def test_a_worker_stays_on_its_cpus_with_all_its_threads() -> None:
    """Memory is bound where the kernel lets it; a container may not, and that is said."""
    program = (
        "import os, threading; from pathlib import Path; from meshlm.protocol.config import MeshConfig, WorkerConfig;"
        "from meshlm.protocol.wire.ids import Identity; from meshlm.runtime.process import numa;"
        "stop = threading.Event(); thread = threading.Thread(target=stop.wait); thread.start();"
        "cpu = min(os.sched_getaffinity(0)); numa.nodes = lambda: {0: {cpu, cpu + 1}};"
        "config = MeshConfig(worker=WorkerConfig(numa_bind=True, numa_bind_nodes=(0,), numa_bind_cpus=(str(cpu),)));"
        "numa.bind(config, Identity.parse('worker/0'));"
        "print(*(sorted(os.sched_getaffinity(int(t))) == [cpu] for t in os.listdir('/proc/self/task'))); stop.set()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["True", "True"]
    assert done.stderr == "" or "memory is not bound" in done.stderr
