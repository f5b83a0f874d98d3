"""Ranks that share experts on two nodes: the tokens of one rank with all experts, also when a process of either node dies.

Two addresses of the loopback interface stand for the hosts: nothing but tcp with the mesh's keys, and torch's store, connects the two.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_answers import reference
from hosts import LoopbackLink, made_keys, states
from mixture import mixture, texts
from serving import Serving, serving
from timed_streams import NUM_TOKENS, Stream
from waiting import free_ports, until

pytestmark = pytest.mark.mesh
NUM_STREAMS = 4
FAKE = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "5", "--fake-lockstep")
OPERATED = ("--enable-sleep-mode", "--server-dev-mode")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made_keys(tmp_path_factory.mktemp("keys") / "mesh.key")


@contextlib.contextmanager
def two_nodes(key_file: str, *common: str) -> Iterator[tuple[Serving, Serving]]:
    """The head with rank 0, and a node with rank 1."""
    link, master_port = LoopbackLink(), free_ports(5, "127.0.0.1")
    both = ("-dp", "2", "--key-file", key_file, "--master-port", str(master_port), "--peer-timeout", "1", *common)
    head = Serving(*both, "--data-parallel-size-local", "1", *link.head_flags)
    node = Serving(*both, "--headless", "--data-parallel-start-rank", "1", *link.node_flags)
    try:
        head.wait_for("ready: http")
        yield head, node
    finally:
        head.stop()
        node.stop()


def is_whole(head: Serving) -> bool:
    found = states(head)
    return {found.get(f"{role}/{index}") for role in ("worker", "scheduler") for index in (0, 1)} == {"ready"}


def kill(owner: Serving, head: Serving, role: str) -> None:
    victim = owner.pid(role)
    os.kill(victim, signal.SIGKILL)
    until(lambda: is_whole(head) and owner.pid(role) != victim, 60)


def test_streams_go_on_whichever_node_loses_a_process(key_file: str) -> None:
    with two_nodes(key_file, *FAKE, *OPERATED) as (head, node), ThreadPoolExecutor(NUM_STREAMS) as pool:
        until(lambda: is_whole(head))
        for owner, role in ((node, "worker"), (head, "worker"), (node, "scheduler"), (head, "coordinator")):
            streams = [Stream(number) for number in range(NUM_STREAMS)]
            ends = [pool.submit(stream.read, head.url) for stream in streams]
            assert all(stream.begun.wait(30) for stream in streams)
            kill(owner, head, role)
            for path in ("/sleep?mode=keep", "/wake_up") if role == "scheduler" else ():
                assert httpx.post(f"{head.url}{path}", timeout=300).status_code == 200, path
            for end in ends:
                end.result(timeout=120)
            for stream in streams:
                assert stream.ids == reference(stream.prompt, NUM_TOKENS), role


def test_experts_of_two_nodes_give_what_one_rank_gives(key_file: str, smollm2: Path, tmp_path: Path) -> None:
    flags = mixture(tmp_path, smollm2)
    with serving(*flags) as alone:
        expected = texts(alone)
    with two_nodes(key_file, *flags, "--enable-expert-parallel") as (head, node):
        until(lambda: is_whole(head))
        assert texts(head) == expected
        for owner in (node, head):
            kill(owner, head, "worker")
            assert texts(head) == expected
