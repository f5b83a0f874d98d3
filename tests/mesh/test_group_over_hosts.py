"""A tensor-parallel group with a worker on each of two hosts: the tokens of one process, and no death or cut loses one.

Network namespaces where they may be made; else two loopback addresses, and no cut.
"""

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hosts import LINKS, PORTS, LoopbackLink, NamespaceLink, link_of, made_keys, states, stream
from serving import Serving
from split_models import FLAGS, PROMPTS, greedy, reference, small_model
from waiting import free_ports, until

pytestmark = pytest.mark.mesh
GROUP = ("--load-format", "dummy", "-tp", "2", "--nnodes", "2", "--max-restarts", "50", "--peer-timeout", "1")
LONG = 200  # tokens: many more than come while a link is being cut


class TwoHosts:
    """The head with worker 0, the node with worker 1."""

    def __init__(self, link: LoopbackLink | NamespaceLink, key_file: str, model: str) -> None:
        self.link, self.master_port = link, free_ports(PORTS, "127.0.0.1")
        flags = (*FLAGS, *GROUP, "--model", model, "--key-file", key_file, "--master-port", str(self.master_port))
        self.head = Serving(*flags, *link.head_flags)
        self.node = Serving(*flags, "--headless", "--node-rank", "1", *link.node_flags, prefix=link.prefix)
        self.head.wait_for("ready: http")

    def stop(self) -> None:
        self.head.stop()
        self.node.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[TwoHosts]:
    key_file = made_keys(tmp_path_factory.mktemp("keys") / "mesh.key")
    if "netns" not in LINKS:
        mesh = TwoHosts(LoopbackLink(), key_file, model)
        yield mesh
        return mesh.stop()
    with link_of("netns") as link:
        assert isinstance(link, NamespaceLink)
        mesh = TwoHosts(link, key_file, model)
        try:
            yield mesh
        finally:
            mesh.stop()


def streamed(hosts: TwoHosts, at_20: Callable[[], None]) -> list[int]:
    """A long greedy stream. `at_20` is called at its 20th piece."""
    pieces = itertools.count(1)

    def piece() -> None:
        if next(pieces) == 20:
            at_20()

    found = stream(hosts.head, PROMPTS[1], LONG, piece, temperature=0)
    assert next(pieces) > 20
    return found


@pytest.fixture(scope="module")
def undisturbed(hosts: TwoHosts) -> list[int]:
    return streamed(hosts, lambda: None)


def workers(hosts: TwoHosts) -> set[int]:
    return {hosts.head.pid("worker"), hosts.node.pid("worker")}


def test_same_tokens_as_one_process(hosts: TwoHosts, model: str) -> None:
    assert greedy(hosts.head) == [reference(model, prompt) for prompt in PROMPTS]
    until(lambda: states(hosts.head).get("worker/1") == "ready")
    assert sorted(states(hosts.node)) == ["supervisor/1", "worker/1"]


def test_the_store_is_at_the_private_address_alone(hosts: TwoHosts) -> None:
    socket.create_connection((hosts.link.address, hosts.master_port), 10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", hosts.master_port), 10)


def test_a_killed_remote_worker_loses_nothing(hosts: TwoHosts, undisturbed: list[int]) -> None:
    """Rank 0 leaves and keeps its store anew at the same port; the stream goes on."""
    victim, before = hosts.node.pid("worker"), workers(hosts)
    assert streamed(hosts, lambda: os.kill(victim, signal.SIGKILL)) == undisturbed
    assert not before & workers(hosts), "both are new"


if "netns" in LINKS:

    def test_a_cut_link_loses_nothing(hosts: TwoHosts, undisturbed: list[int]) -> None:
        """For longer than --peer-timeout: worker 1 lives on without its group, and leaves it when it is heard again."""
        link, before, is_cut = hosts.link, workers(hosts), threading.Event()
        assert isinstance(link, NamespaceLink)

        def cut() -> None:
            hosts.head.forget()
            link.cut()
            is_cut.set()

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(streamed, hosts, cut)
            assert is_cut.wait(60)
            hosts.head.wait_for("worker/0 died and is started again")
            link.restore()
            assert answer.result(90) == undisturbed
        until(lambda: set(states(hosts.head).values()) | set(states(hosts.node).values()) == {"ready"})
        assert not before & workers(hosts), "both are new"
