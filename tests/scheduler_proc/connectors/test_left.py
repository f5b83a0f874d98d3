"""Prompts that are left to another mesh: what the answer tells, what is leased, and until when."""

import json
from typing import Any

import pytest
from kv_device import BLOCK, GROUPS
from page_world import World, expected

from meshlm.protocol.config.kv_transfer import PageTransfer
from meshlm.protocol.edges.kv import KEY_BYTES, LeavePages, PagesTaken
from meshlm.protocol.kv import CrossAttention, KVSpec
from meshlm.protocol.kv_transfer import KVTransfer
from meshlm.protocol.remote_pages import TICKET_BYTES
from meshlm.protocol.wire.columns import ints

PROMPT = [n % 5 for n in range(26)]
LEAVES = KVTransfer(b'{"do_remote_decode":true}', leaves=True)
LEASE_S = 10.0


def world(num_workers: int = 1, specs: tuple[KVSpec, ...] = GROUPS[0], **transfer: Any) -> World:
    named: dict[str, Any] = {
        "connector": "NixlConnector",
        "role": "kv_both",
        "host": "h",
        "port": 0,
        "lease_s": LEASE_S,
    } | transfer
    return World(1, num_workers, 200, specs, transfer=PageTransfer(**named), engine_id="mesh")


def leave(one: World, extra: KVTransfer = LEAVES, max_tokens: int = 1) -> dict[str, Any]:
    """A request that leaves its prompt; what its answer tells."""
    name = one.ask(PROMPT, max_tokens=max_tokens, extras=(extra,))
    one.settle()
    assert one.asks[name].tokens == expected(PROMPT, max_tokens)
    told = one.asks[name].kv_transfer
    return json.loads(told) if told else {}


def leases(one: World) -> int:
    return len(one.cores[0].batching.kv.pool.leases)


def taken(one: World, nth: int, left: LeavePages) -> None:
    one._say(one.workers[0][nth], PagesTaken(left.session, left.number))
    one.settle()


@pytest.mark.parametrize(
    "specs", [one for one in GROUPS if one and not any(isinstance(s, CrossAttention) for s in one)]
)
def test_the_answer_tells_where_its_pages_are_leased(specs: tuple[KVSpec, ...]) -> None:
    one = world(2, specs)
    told = leave(one)
    assert (told["do_remote_prefill"], told["do_remote_decode"], told["remote_engine_id"]) == (True, False, "mesh")
    assert (told["remote_host"], told["remote_port"], told["remote_ports"], told["tp_size"]) == (
        "h",
        100,
        [100, 101],
        2,
    )
    if not leases(one):
        return  # a group whose checkpoints are not as close as this
    for worker in one.workers[0]:
        (left,) = worker.left
        assert left.ticket.hex() == told["ticket"]
        assert len(left.ticket) == TICKET_BYTES
        assert len(left.keys) // KEY_BYTES == len(ints(left.pages)) <= len(specs) * (len(PROMPT) // BLOCK)
    taken(one, 0, left)
    assert leases(one) == 1
    taken(one, 1, left)
    assert leases(one) == 0
    one.finish()


def test_a_lease_ends_by_itself_a_second_behind_the_workers() -> None:
    one = world()
    leave(one)
    (left,) = one.workers[0][0].left
    assert left.deadline_ns <= (one.now + LEASE_S) * 1e9
    one.tick(LEASE_S)
    assert leases(one) == 1
    one.tick(2.0)
    assert leases(one) == 0
    taken(one, 0, left)  # too late, and nothing of it


def test_requests_that_leave_nothing_tell_nothing() -> None:
    one = world()
    one.ask(PROMPT)
    one.settle()
    assert one.asks["r0"].kv_transfer == b""
    assert not one.workers[0][0].left


def test_tickets_are_of_their_request_alone() -> None:
    one = world()
    assert leave(one)["ticket"] != leave(one)["ticket"]
    assert one.cores[0].limits.secret == b""  # of this world; a real one has random bytes


def test_an_id_is_its_ticket_and_the_answer_tells_nothing() -> None:
    one = world(by_request_id=True, role="kv_producer")
    extra = KVTransfer(json.dumps({"ticket": "ab" * TICKET_BYTES}).encode(), leaves=True)
    assert leave(one, extra) == {}
    (left,) = one.workers[0][0].left
    assert left.ticket == bytes.fromhex("ab" * TICKET_BYTES)


def test_a_worker_that_dies_takes_its_leases_along() -> None:
    one = world()
    leave(one)
    one.kill_worker(0, 0)
    one.settle()
    assert leases(one) == 0
    assert leave(one)["remote_port"] == 100
    one.finish()
