"""Orders for another number of ranks that come through a frontend: each is answered once, when its change is over."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from msgspec import Struct

from meshlm.protocol.config import KVTransferConfig, MeshConfig, ParallelConfig
from meshlm.protocol.edges.control import AskProcesses, RanksScaled, ScaleRanks, SetRanks
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Role
from meshlm.supervisor.group import events, rolling
from meshlm.supervisor.ranks import Ranks
from meshlm.supervisor.settings import kv_transfer
from meshlm.supervisor.settings.placement import identities

F0, F1 = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)


class Host:
    """A supervisor without processes."""

    def __init__(self, dp_roles: str = "", **parallel: object) -> None:
        self.config = kv_transfer.settled(
            MeshConfig(
                parallel=msgspec.convert(parallel, ParallelConfig), kv_transfer=KVTransferConfig(dp_roles=dp_roles)
            )
        )
        self.ready = asyncio.Event()
        self.ready.set()
        self.sent: list[tuple[Identity, Struct]] = []
        self.done: list[rolling.Event] = []
        self.ranks = Ranks(
            self, rolling.Rolling.of_mesh(identities(self.config), self.config), self.done.append, lambda: 5.0
        )

    @property
    def line(self) -> Callable[[str], None]:
        return lambda text: None

    def send(self, peer: Identity, message: Struct) -> bool:
        self.sent.append((peer, message))
        return True

    def linked(self, role: Role) -> list[Identity]:
        return [F0, F1] if role is Role.FRONTEND else []


@pytest.mark.parametrize("failure", ["", "scheduler/1 died"])
async def test_the_asker_hears_of_the_end_and_all_frontends_of_the_number(failure: str) -> None:
    host = Host()
    assert host.ranks.asked(F1, ScaleRanks("a", 2, 7.0))
    assert host.sent == [(COORDINATOR, SetRanks(2))], "others hear of it when the ranks are there"
    assert host.done == [events.Add((Identity(Role.WORKER, 1), Identity(Role.SCHEDULER, 1)))]
    assert host.ranks.asked(F0, ScaleRanks("b"))
    assert host.sent.pop() == (F0, RanksScaled("b", 2, "adding rank 1"))
    host.sent.clear()
    host.ranks.changed(failure)
    number = 1 if failure else 2
    *rest, last = host.sent
    assert last == (F1, RanksScaled("a", number, failed=failure))
    assert rest[-2:] == [(F0, SetRanks(number)), (F1, SetRanks(number))]
    host.ranks.changed("")
    assert last not in host.sent[len(rest) + 1 :], "once"


async def test_what_is_not_begun_is_answered_at_once() -> None:
    host = Host()
    assert not host.ranks.asked(F0, AskProcesses())
    host.ranks.asked(F0, ScaleRanks("same", 1))
    assert host.sent == [(F0, RanksScaled("same", 1))]
    host = Host(data_parallel_size=4, data_parallel_rank=3, data_parallel_external_lb=True)
    host.ranks.asked(F0, ScaleRanks("outer", 2))
    ((_, answer),) = host.sent
    assert isinstance(answer, RanksScaled)
    assert "outer balancer" in answer.refused
    host.ready.clear()
    host.ranks.asked(F0, ScaleRanks("early", 2))
    assert host.sent[-1] == (F0, RanksScaled("early", 4, refused="the mesh is not ready yet"))


def test_ranks_that_come_decode_and_one_that_decodes_stays() -> None:
    host = Host("prefill:2,decode:1", data_parallel_size=3)
    assert host.ranks.scale(4, 1.0) == ""
    kv = host.config.kv_transfer
    assert (kv.dp_roles, kv.num_prefill_ranks) == ("prefill:2,decode:2", 2)
    host.ranks.changed("")
    says = (
        "--dp 2: a rank has to decode beside those for prompts (prefill:2,decode:2); `meshlm set dp-roles` changes that"
    )
    assert host.ranks.scale(2, 1.0) == says
    assert host.ranks.scale(3, 1.0) == ""
    assert SetRanks(3).applied(host.config) == host.config
