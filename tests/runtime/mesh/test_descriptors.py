"""What a large mesh's links take: sockets of a context, and files."""

import resource

import pytest
import zmq

from meshlm.protocol.config import MeshConfig, ParallelConfig, ServerConfig
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Role
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.mesh import descriptors

LARGE = MeshConfig(
    parallel=ParallelConfig(data_parallel_size=1024), server=ServerConfig(frontends=256, detokenizers=256)
)


@pytest.mark.parametrize(
    ("me", "count"),
    [
        (COORDINATOR, 2 * 1024 + 2 * 256 + 1),
        (Identity(Role.FRONTEND), 256 + 2),
        (Identity(Role.DETOKENIZER), 256 + 1024 + 2),
        (Identity(Role.SCHEDULER, 9), 256 + 1 + 1 + 1),
        (Identity(Role.WORKER, 9), 3),
    ],
    ids=lambda value: str(value),
)
def test_links_to_all_places(me: Identity, count: int) -> None:
    assert descriptors.num_links(me, LARGE) == count


def test_a_context_has_a_socket_for_each_link() -> None:
    """ZeroMQ's own limit is 1,023: beyond it a detokenizer of 1,024 ranks could not have all its links."""
    for me in (COORDINATOR, Identity(Role.DETOKENIZER)):
        with descriptors.context(me, LARGE) as context:
            assert context.get(zmq.MAX_SOCKETS) > descriptors.num_links(me, LARGE) > 1023


def test_the_soft_limit_is_raised_and_a_low_hard_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, values: limits.append(values))
    descriptors.claim(COORDINATOR, LARGE)
    assert limits[-1] == (100_000, 100_000)
    limits.append((1024, 4096))
    with pytest.raises(ProcessFatal, match=r"coordinator/0 may open 4096 files, and its links need 7811.*ulimit -Hn"):
        descriptors.claim(COORDINATOR, LARGE)
    limits.append((1024, resource.RLIM_INFINITY))
    descriptors.claim(COORDINATOR, LARGE)
