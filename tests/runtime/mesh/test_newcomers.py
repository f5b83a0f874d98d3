"""Who may open a link unasked: forged hellos of the same user do not take a process's sockets."""

import asyncio
import os
from pathlib import Path

import pytest
import zmq
from meshes import LIMIT_S, Deaf

from meshlm.protocol.config import MeshConfig, ParallelConfig, RunConfig, ServerConfig
from meshlm.protocol.edges.control import Member, Members
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.frames import FrameError, Header, Kind, pack
from meshlm.protocol.wire.ids import COORDINATOR, Epoch, Identity, Incarnation, Role
from meshlm.protocol.wire.session import Hello, _encode
from meshlm.runtime.mesh import newcomers as newcomers_module
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.mesh.newcomers import EXPIRES_S, MAX_NEWCOMERS, Newcomers

DETOKENIZER = Identity(Role.DETOKENIZER)


def config_of(run_dir: Path | str = "") -> MeshConfig:
    return MeshConfig(
        run=RunConfig(run_dir=str(run_dir)),
        parallel=ParallelConfig(data_parallel_size=3, tensor_parallel_size=2),
        server=ServerConfig(frontends=2, detokenizers=2),
    )


def test_places_of_the_configuration_come_and_stay() -> None:
    found = Newcomers(DETOKENIZER, config_of())
    for peer in (Identity(Role.FRONTEND, 1), Identity(Role.SCHEDULER, 2), COORDINATOR, Identity(Role.SUPERVISOR)):
        assert found.may_stay(peer)


def test_who_has_no_business_here_does_not_come() -> None:
    found = Newcomers(Identity(Role.WORKER, 3), config_of())
    assert found.may_stay(Identity(Role.SCHEDULER, 1))
    for peer in (Identity(Role.SCHEDULER, 0), Identity(Role.WORKER, 2), Identity(Role.FRONTEND)):
        with pytest.raises(FrameError, match=f"{peer}, with which worker/3 has no channel"):
            found.may_stay(peer)


def test_others_come_in_a_bounded_number_until_they_are_named() -> None:
    found = Newcomers(DETOKENIZER, config_of())
    ranks = [Identity(Role.SCHEDULER, 3 + number) for number in range(MAX_NEWCOMERS + 1)]
    for rank in ranks[:-1]:
        assert not found.may_stay(rank)
        found.here.add(rank)
    with pytest.raises(FrameError, match="nobody knows"):
        found.may_stay(ranks[-1])
    found.name(frozenset(ranks[:2] + ranks[-1:]))
    assert found.may_stay(ranks[-1])
    assert len(found.here) == MAX_NEWCOMERS - 2


async def test_forged_hellos_take_few_links_and_no_place_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 of them took all sockets of a process: nobody could reach it any more."""
    monkeypatch.setattr(newcomers_module, "MAX_NEWCOMERS", 8)
    listener = Downs()
    mesh = Mesh(DETOKENIZER, Incarnation(1), config_of(tmp_path), listener)
    await mesh.open()
    before = len(os.listdir("/proc/self/fd"))
    body = _encode(Hello(schema_digest(), "ipc://x", incarnation=Incarnation(5)))

    def hello(peer: Identity) -> bytes:
        return pack(Header(Kind.HELLO, peer, DETOKENIZER, Incarnation(5), Incarnation(0), 0, 0), body)

    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.connect(mesh._links.address_of(DETOKENIZER))
        for number in range(2000):
            sock.send(hello(Identity(Role.SCHEDULER, 10 + number)))
        sock.send(hello(Identity(Role.SCHEDULER, 2)))  # one of the configuration
        while await asyncio.wait_for(listener.up.get(), LIMIT_S) != Identity(Role.SCHEDULER, 2):
            pass
    assert len(mesh.peers(Role.SCHEDULER)) == 9
    assert len(os.listdir("/proc/self/fd")) - before < 60
    known = Identity(Role.SCHEDULER, 10)
    mesh._on_members(Members(Epoch(1), (Member(known, Incarnation(5), mesh._links.address_of(known)),)))
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + EXPIRES_S + 1)
    mesh._tick()
    assert mesh.peers(Role.SCHEDULER) == [Identity(Role.SCHEDULER, 2), known]
    assert listener.down == [Identity(Role.SCHEDULER, 11 + number) for number in range(7)]
    monkeypatch.undo()
    await mesh.close()


class Downs(Deaf):
    def __init__(self) -> None:
        self.down: list[Identity] = []
        self.up: asyncio.Queue[Identity] = asyncio.Queue()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self.up.put_nowait(peer)

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self.down.append(peer)
