"""Restarts over several nodes: the head's part, the nodes' parts, one after the other, and what goes wrong."""

from msgspec import Struct

from meshlm.protocol.edges.control import RestartNews, RestartProcesses
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.group import rolling
from meshlm.supervisor.group.core import Group
from meshlm.supervisor.group.events import BecameReady, Start
from meshlm.supervisor.group.operations import Operations

HEAD, NODE, OTHER = (Identity(Role.SUPERVISOR, index) for index in (0, 2, 3))
COORDINATOR, FRONTEND = Identity(Role.COORDINATOR), Identity(Role.FRONTEND)
S0, S1, S2 = (Identity(Role.SCHEDULER, index) for index in range(3))
ALL: dict[str, object] = {"command": "restart", "what": "all"}
NEWS = {"command": "restart-news", "from": 0}


class Bench:
    """Operations of a supervisor whose group does nothing but count what it is asked for."""

    def __init__(self, *own: Identity, elsewhere: dict[Identity, Identity] | None = None) -> None:
        self.elsewhere = elsewhere or {}
        self.asked: list[rolling.Event] = []
        self.sent: list[tuple[Identity, Struct]] = []
        self.reachable = True
        group = Group(own, 3, 60.0)
        group.handle(Start(), 1.0)
        for identity in own:
            group.handle(BecameReady(identity, group.processes[identity].incarnation), 1.0)
        self.operations = Operations(
            rolling.Rolling(group), self.asked.append, lambda on: None, lambda: None, lambda: self.elsewhere, self._send
        )

    def _send(self, peer: Identity, message: Struct) -> bool:
        self.sent.append((peer, message))
        return self.reachable

    def news(self) -> tuple[list[str], str | None]:
        answer = self.operations.answer(NEWS)
        return answer["lines"], answer["outcome"]


def head() -> Bench:
    return Bench(COORDINATOR, S0, FRONTEND, elsewhere={S1: NODE, S2: OTHER})


def test_each_supervisor_has_its_part_in_the_order_of_the_whole() -> None:
    bench = head()
    assert bench.operations.answer(ALL)["processes"] == [str(i) for i in (COORDINATOR, S0, S1, S2, FRONTEND)]
    assert bench.asked == [rolling.Restart((COORDINATOR, S0))]
    assert bench.sent == []
    bench.operations.over("")
    assert bench.sent == [(NODE, RestartProcesses((S1,)))]
    bench.operations.restart_news(NODE, RestartNews(("scheduler/1: ending",)))
    bench.operations.restart_news(OTHER, RestartNews(("not its turn",), True, "no"))
    assert bench.news() == (["scheduler/1: ending"], None)
    assert bench.operations.answer(ALL) == {"error": "a restart is under way"}
    bench.operations.restart_news(NODE, RestartNews(over=True))
    assert bench.sent[1:] == [(OTHER, RestartProcesses((S2,)))]
    bench.operations.restart_news(OTHER, RestartNews(over=True))
    assert bench.asked[1:] == [rolling.Restart((FRONTEND,))]
    bench.operations.over("")
    assert bench.news()[1] == ""


def test_what_fails_on_a_node_ends_the_whole() -> None:
    for failure in ("no room", "lost", "unreachable"):
        bench = head()
        bench.operations.answer({"command": "restart", "what": "scheduler"})
        bench.reachable = failure != "unreachable"
        bench.operations.over("")
        bench.operations.node_lost(OTHER)  # not its turn
        if failure == "no room":
            bench.operations.restart_news(NODE, RestartNews(over=True, failure="no room"))
        elif failure == "lost":
            bench.operations.node_lost(NODE)
        outcome = bench.news()[1]
        assert outcome
        assert {"no room": "no room", "lost": "was lost", "unreachable": "cannot be reached"}[failure] in outcome
        assert len(bench.sent) == 1, "the next one was not asked"
        bench.reachable = True
        assert "processes" in bench.operations.answer(ALL), "another one can begin"


def test_one_process_of_another_node_and_one_that_is_nowhere() -> None:
    bench = head()
    assert bench.operations.answer({"command": "restart", "what": "scheduler/2"}) == {"processes": [str(S2)]}
    assert bench.sent == [(OTHER, RestartProcesses((S2,)))]
    answer = head().operations.answer({"command": "restart", "what": "scheduler/7"})
    assert answer == {"error": "there is no scheduler/7; there is scheduler/0, scheduler/1, scheduler/2"}


def test_a_node_does_its_part_and_tells_the_head() -> None:
    bench = Bench(S1)
    bench.operations.restart_for(HEAD, RestartProcesses((S1,)))
    assert bench.asked == [rolling.Restart((S1,))]
    bench.operations.restart_for(HEAD, RestartProcesses((S1,)))
    assert bench.sent == [(HEAD, RestartNews(over=True, failure="a restart is under way"))]
    bench.operations.say("scheduler/1: ending")
    bench.operations.over("")
    assert bench.sent[1:] == [(HEAD, RestartNews(("scheduler/1: ending",))), (HEAD, RestartNews(over=True))]
    bench.operations.say("later")
    assert len(bench.sent) == 3, "nobody asked any more"
    bench.operations.restart_for(HEAD, RestartProcesses((S1, S2)))
    assert bench.sent[3:] == [(HEAD, RestartNews(over=True, failure="there is no scheduler/2"))]


def test_draining_is_the_heads() -> None:
    assert "on the head" in Bench(S1).operations.answer({"command": "drain", "on": True})["error"]
    assert head().operations.answer({"command": "drain", "on": True}) == {"refusing": True, "num_open": None}
