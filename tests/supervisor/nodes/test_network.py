"""What the head and a node that joins it tell each other of deaths and of standbys. Their supervisors are a list of what was said."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from meshlm.protocol.config import MeshConfig, Node
from meshlm.protocol.edges.control import ChangeSettings, Died, NodeJoin, NodeReport, NodeWelcome
from meshlm.protocol.wire.ids import HEAD, Identity, Incarnation, Role
from meshlm.supervisor import io
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.control import MeshStatus, StandbyStatus
from meshlm.supervisor.nodes import core
from meshlm.supervisor.nodes.network import Guest, Head

GUEST, THIRD = Identity(Role.SUPERVISOR, 2), Identity(Role.SUPERVISOR, 3)
FACTS = {"the version": "1"}
COORDINATOR_DIED = Died(Identity(Role.COORDINATOR, 0), Incarnation(5))
WORKER_DIED = Died(Identity(Role.WORKER, 1), Incarnation(6))


class Own:
    """A supervisor that keeps what it is told to say."""

    def __init__(self, network: "Callable[[MeshConfig, Any], Head | Guest]", head: str) -> None:
        place = (1, 1) if head else (0, 1)
        node = Node(index=place[0], id="x", address="127.0.0.1", head=head, host="host-b", ranks=place, workers=place)
        config = msgspec.structs.replace(MeshConfig(), node=node)
        self.sent: list[tuple[Identity, Struct]] = []
        self.dead: dict[Identity, Died] = {}
        self.lines: list[str] = []
        self.standbys: list[StandbyStatus] = []
        self.changed_settings: dict[str, str | int | float] = {}
        self.network = network(config, self)

    def died(self, died: Died) -> None:
        """One of this node's own."""
        self.tell_died(died)
        self.network.died(died)

    def deaths_sent_to(self, peer: Identity) -> list[Struct]:
        return [message for to, message in self.sent if to == peer and isinstance(message, Died)]

    # --- for Head and Guest ---

    def change(self, values: dict[str, str | int | float]) -> str:
        self.changed_settings |= values
        return ""

    def tell_died(self, died: Died) -> None:
        self.dead[died.identity] = died

    def deaths(self) -> list[Died]:
        return list(self.dead.values())

    def send(self, peer: Identity, message: Struct) -> bool:
        self.sent.append((peer, message))
        return True

    def status(self) -> MeshStatus:
        return MeshStatus([], self.standbys)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def begin(self) -> None: ...


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nodes must have in common is test_nodes.py's."""
    monkeypatch.setattr(core, "facts", lambda config: FACTS)


@pytest.fixture
def head() -> Own:
    return Own(Head, "")


@pytest.fixture
def guest() -> Own:
    return Own(Guest, "tcp://127.0.0.1:5600")


def join(head: Own, peer: Identity, rank: int) -> None:
    places = (rank, 1)
    head.network.on_message(peer, NodeJoin("host-b", places, places, FACTS))


def test_a_node_that_joins_is_told_of_deaths_from_before(head: Own) -> None:
    """Also of one between the moment in which its link opened and the one in which the head let it in."""
    head.network.on_up(GUEST)
    head.died(COORDINATOR_DIED)
    assert head.sent == [], "nobody is here yet"
    join(head, GUEST, 1)
    assert [message for _, message in head.sent] == [NodeWelcome(), COORDINATOR_DIED]


def test_a_head_that_was_away_is_told_and_tells_the_others(head: Own, guest: Own) -> None:
    guest.network.on_up(HEAD)
    guest.network.on_message(HEAD, NodeWelcome())
    guest.network.on_down(HEAD, "it ended")
    guest.died(WORKER_DIED)
    guest.network.on_up(HEAD)
    assert guest.deaths_sent_to(HEAD) == [], "a new head does not know this node yet"
    guest.network.on_message(HEAD, NodeWelcome())
    assert guest.deaths_sent_to(HEAD) == [WORKER_DIED]

    join(head, THIRD, 2)
    join(head, GUEST, 1)
    head.network.on_message(GUEST, WORKER_DIED)
    assert head.dead == {WORKER_DIED.identity: WORKER_DIED}
    assert head.deaths_sent_to(THIRD) == [WORKER_DIED]
    assert head.deaths_sent_to(GUEST) == [], "it said so itself"


async def test_an_earlier_death_that_is_told_late_changes_nothing() -> None:
    """A head that was away knows of one incarnation, the node of the next."""
    told: list[tuple[Identity, Struct]] = []
    supervisor: Any = io.Supervisor(MeshConfig(), [], StartDisplay())
    supervisor._mesh = SimpleNamespace(
        peers=lambda role: [Identity(role)] if role is Role.SCHEDULER else [],
        send=lambda peer, message: told.append((peer, message)),
    )
    later = Died(WORKER_DIED.identity, Incarnation(WORKER_DIED.incarnation + 1))
    for died in (later, WORKER_DIED, later):
        supervisor.tell_died(died)
    assert list(supervisor.deaths()) == [later]
    assert told == [(Identity(Role.SCHEDULER), later)] * 2


def test_standbys_of_a_node_are_in_the_heads_status(head: Own, guest: Own) -> None:
    guest.standbys = [StandbyStatus("worker", 7, "standby", 3.0, 1 << 26)]
    guest.network.on_message(HEAD, NodeWelcome())
    guest.network.tick()
    ((_, report),) = [said for said in guest.sent if isinstance(said[1], NodeReport)]
    join(head, GUEST, 1)
    head.network.on_message(GUEST, report)
    (row,) = head.network.standbys()
    assert (row.role, row.pid, row.state, row.rss_bytes, row.host) == ("worker", 7, "standby", 1 << 26, "host-b")
    assert 3.0 <= row.uptime_s < 60.0
    head.network.on_down(GUEST, "silent")
    assert [row.state for row in head.network.standbys()] == ["lost"]


def test_a_node_that_comes_back_is_told_what_it_missed(head: Own) -> None:
    join(head, GUEST, 1)
    head.network.on_down(GUEST, "silent")
    head.died(COORDINATOR_DIED)
    assert head.deaths_sent_to(GUEST) == []
    head.network.on_up(GUEST)
    join(head, GUEST, 1)
    assert head.deaths_sent_to(GUEST) == [COORDINATOR_DIED]


def test_the_head_says_what_no_node_has_and_not_too_often() -> None:
    now = [0.0]

    def made(config: MeshConfig, own: Any) -> Head:
        sizes = msgspec.structs.replace(config.parallel, data_parallel_size=2)
        network = msgspec.structs.replace(config.network, listen="tcp://10.0.0.1:5600")
        return Head(msgspec.structs.replace(config, parallel=sizes, network=network), own, lambda: now[0])

    head = Own(made, "")

    def said_until(end: float) -> list[str]:
        head.lines.clear()
        while now[0] < end:
            now[0] += 0.5
            head.network.tick()
        return list(head.lines)

    text = "no node has rank 1; waiting for one with --headless --join tcp://10.0.0.1:5600"
    assert said_until(9.5) == [], "nodes come in any order"
    assert said_until(69.5) == [text]
    assert said_until(80) == [text]
    join(head, GUEST, 1)
    assert (said_until(200), head.network.missing()) == ([], "")
    head.network.on_down(GUEST, "silent")
    assert (said_until(215), head.network.missing()) == ([text], "rank 1")


def test_a_node_learns_what_was_changed_before_it_joined(head: Own, guest: Own) -> None:
    head.changed_settings = {"log_level": "debug"}
    head.network.on_message(GUEST, NodeJoin("host-b", (1, 1), (1, 1), FACTS))
    (message,) = [message for to, message in head.sent if isinstance(message, ChangeSettings)]
    guest.network.on_message(HEAD, message)
    assert guest.changed_settings == {"log_level": "debug"}
