"""Routers follow the prefix caches of real ranks: through gaps, resets, and the deaths of schedulers and workers."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_answers import complete, reference
from kv_subscriber import KVSubscriber
from serving import Serving, serving
from waiting import free_ports

pytestmark = pytest.mark.mesh
NUM_RANKS = 2
FLAGS = ("--device", "fake", "--fake-step-ms", "1", "--max-model-len", "1024", "-dp", str(NUM_RANKS))
NUM_BLOCKS = 80  # of a rank


def prompt(number: int) -> list[int]:
    return [1000 * number + at for at in range(40)]


def subscribe(first: int, rank: int) -> KVSubscriber:
    return KVSubscriber(first + rank, first + NUM_RANKS + rank)


class Routed:
    """A mesh, and a subscriber to each of its ranks, which was there before it."""

    def __init__(self, server: Serving, first: int, ranks: list[KVSubscriber]) -> None:
        self.server, self.first, self.ranks = server, first, ranks

    def ask(self, number: int, rank: int, count: int = 24) -> int:
        """One completion at this rank, of which its subscriber hears; the number of tokens that were cached."""
        body = {"prompt": prompt(number), "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
        headers = {"X-data-parallel-rank": str(rank)}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, headers=headers, timeout=300).json()
        tokens = prompt(number) + reference(prompt(number), count)
        assert answer["choices"][0]["token_ids"] == tokens[40:]
        full = (len(tokens) - 1) // 16 * 16  # the last token was sampled, and not computed
        self.ranks[rank].hear(lambda: self.ranks[rank].has(tokens[:full]))
        found: int = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return found

    def kill(self, role: str, rank: int) -> None:
        """Kill the process, and wait for the next one."""
        (pid,) = [p["pid"] for p in self.server.status()["processes"] if (p["role"], p["index"]) == (role, rank)]
        self.server.forget()
        os.kill(pid, signal.SIGKILL)
        self.server.wait_for(f"{role}/{rank} is ready")


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    first = free_ports(2 * NUM_RANKS, "127.0.0.1")
    events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    events |= {"endpoint": f"tcp://*:{first}", "replay_endpoint": f"tcp://*:{first + NUM_RANKS}"}
    flags = ("--kv-events-config", json.dumps(events), "--num-gpu-blocks-override", str(NUM_BLOCKS))
    ranks = [subscribe(first, rank) for rank in range(NUM_RANKS)]
    with serving(*FLAGS, *flags, "--server-dev-mode", "--enable-prompt-tokens-details") as server:
        yield Routed(server, first, ranks)
    for one in ranks:
        one.close()


def test_each_rank_tells_of_its_own_blocks(routed: Routed) -> None:
    for rank, subscriber in enumerate(routed.ranks):
        assert routed.ask(1 + rank, rank) == 0
        assert subscriber.ranks == {rank}
        assert not subscriber.has(prompt(2 - rank)), "the other rank's"
        assert (subscriber.numbers[0], subscriber.num_cleared) == (0, 1), "what a scheduler begins with"
        assert routed.ask(1 + rank, rank, 8) == 32, "that block was there"


def test_a_gap_is_filled_and_late_comers_catch_up(routed: Routed) -> None:
    subscriber = routed.ranks[0]
    complete(routed.server, prompt(3), 1)
    complete(routed.server, prompt(3), 1)  # at the rank that has it
    routed.ask(4, 0)
    before = subscriber.numbers[-1]
    late = subscribe(routed.first, 0)
    numbers = late.replay(0)
    assert numbers[0] == 0
    assert numbers == [*range(len(numbers))]
    routed.ask(5, 0)
    late.replay(numbers[-1] + 1)
    assert late.known == subscriber.known
    assert late.numbers[-1] == subscriber.numbers[-1] > before
    late.close()


def test_blocks_whose_memory_is_needed_are_removed(routed: Routed) -> None:
    subscriber = routed.ranks[1]
    routed.ask(6, 1)
    for number in range(20, 20 + NUM_BLOCKS // 3):  # of three blocks each
        routed.ask(number, 1)
    assert not subscriber.has(prompt(6)[:32])
    assert len(subscriber.known) <= NUM_BLOCKS
    cached = routed.ask(20 + NUM_BLOCKS // 3 - 1, 1)
    assert cached == 32, "what it knows is there"


def test_a_scheduler_dies(routed: Routed) -> None:
    """Its successor numbers from 0 on, and begins with the word that nothing is known. What its workers kept is told with each hit."""
    subscriber, other = routed.ranks
    routed.ask(7, 0)
    heard = len(subscriber.numbers)
    assert len(subscriber.known) > 3
    routed.kill("scheduler", 0)
    subscriber.hear(lambda: len(subscriber.numbers) > heard)
    assert subscriber.numbers[heard] == 0
    assert subscriber.known == {}
    assert routed.ask(7, 0) == 32, "the cache outlived its scheduler"
    assert subscriber.has(prompt(7)[:32])
    assert subscriber.numbers[heard:] == [*range(len(subscriber.numbers) - heard)]
    assert other.num_cleared == 1, "the other rank has nothing to say of it"


def test_a_worker_dies(routed: Routed) -> None:
    """All that it had is gone."""
    subscriber, other = routed.ranks
    routed.ask(8, 0)
    cleared, last = subscriber.num_cleared, subscriber.numbers[-1]
    routed.kill("worker", 0)
    subscriber.hear(lambda: subscriber.num_cleared > cleared)
    assert subscriber.known == {}
    assert subscriber.numbers[-1] == last + 1, "of the same scheduler"
    assert routed.ask(8, 0) == 0
    assert subscriber.has(prompt(8)[:32])
    assert other.num_cleared == 1


def test_the_prefix_cache_is_reset(routed: Routed) -> None:
    before = [one.num_cleared for one in routed.ranks]
    for rank in range(NUM_RANKS):
        routed.ask(9, rank)
    assert httpx.post(f"{routed.server.url}/reset_prefix_cache", timeout=300).status_code == 200
    for rank, subscriber in enumerate(routed.ranks):
        subscriber.hear(lambda one=subscriber, at=rank: one.num_cleared > before[at])  # type: ignore[misc]
        assert subscriber.known == {}
        assert routed.ask(9, rank) == 0
