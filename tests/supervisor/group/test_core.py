"""The process group's rules under random deaths."""

from group_bench import FRONTEND, NEW, OTHER, WORKER, die, ready, running, started
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.wire.ids import Identity
from meshlm.supervisor.group.core import Group, State
from meshlm.supervisor.group.events import (
    Add,
    AllReady,
    AllStopped,
    AskToStop,
    Beaten,
    Drained,
    Effect,
    EndSteps,
    Exited,
    GiveUp,
    Replace,
    Retire,
    SaidFailed,
    Spawn,
    Start,
    StepsEnded,
    Stop,
    TellDied,
    Tick,
)


def test_all_ready_is_said_once() -> None:
    group = started()
    assert ready(group, FRONTEND) == []
    assert ready(group, WORKER) == [AllReady()]
    assert ready(group, WORKER) == []


def test_a_failed_start_ends_with_the_childs_own_words() -> None:
    group = started()
    incarnation = group.processes[WORKER].incarnation
    group.handle(SaidFailed(WORKER, incarnation, "no memory"), 1001.0)
    assert group.handle(Exited(WORKER, incarnation, 1), 1001.0) == [GiveUp("no memory")]


def test_a_start_that_would_go_further_with_a_shorter_context_says_so() -> None:
    """Once the mesh was ready it is a death as any other."""
    group = started()
    incarnation = group.processes[WORKER].incarnation
    group.handle(SaidFailed(WORKER, incarnation, "no room", 448), 1001.0)
    assert group.handle(Exited(WORKER, incarnation, 1), 1001.0) == [GiveUp("no room", 448)]
    group = started()
    incarnation = group.processes[WORKER].incarnation
    ready(group, FRONTEND), ready(group, WORKER)
    group.handle(SaidFailed(WORKER, incarnation, "no room", 448), 1001.0)
    assert not any(isinstance(effect, GiveUp) for effect in group.handle(Exited(WORKER, incarnation, 1), 1001.0))


def test_a_kill_during_the_start_spares_the_clients_of_those_that_serve() -> None:
    group = Group([FRONTEND, WORKER, OTHER], 3, 60.0)
    group.handle(Start(), 1000.0)
    ready(group, FRONTEND)
    ready(group, WORKER)
    assert [type(effect) for effect in die(group, OTHER, 1001.0)] == [TellDied, Spawn]
    incarnation = group.processes[OTHER].incarnation
    group.handle(SaidFailed(OTHER, incarnation, "no memory"), 1002.0)
    assert group.handle(Exited(OTHER, incarnation, 1), 1002.0) == [GiveUp("no memory")], "a start that cannot succeed"


def test_a_kill_during_the_start_ends_it_where_nobody_serves() -> None:
    group = Group([FRONTEND, WORKER, OTHER], 3, 60.0)
    group.handle(Start(), 1000.0)
    ready(group, FRONTEND)
    (end,) = die(group, OTHER, 1001.0)
    assert isinstance(end, GiveUp)


def starting() -> Group:
    """Clients may be there already: only the second worker is not ready yet."""
    group = Group([FRONTEND, WORKER, OTHER], 3, 60.0)
    group.handle(Start(), 1000.0)
    ready(group, FRONTEND)
    ready(group, WORKER)
    return group


def test_while_the_last_one_starts_the_others_may_die_more_than_once() -> None:
    group = starting()
    assert [type(effect) for effect in die(group, WORKER, 1002.0)] == [TellDied, Spawn]
    assert [type(effect) for effect in die(group, FRONTEND, 1002.1)] == [TellDied, Spawn], (
        "nobody of some role is ready"
    )
    assert [type(effect) for effect in die(group, WORKER, 1002.2)] == [TellDied], "it is started again a moment later"
    assert [type(effect) for effect in group.handle(Tick(), 1002.4)] == [Spawn]
    incarnation = group.processes[WORKER].incarnation
    group.handle(SaidFailed(WORKER, incarnation, "no memory"), 1003.0)
    effects = group.handle(Exited(WORKER, incarnation, 1), 1003.0)
    assert [type(effect) for effect in effects] == [TellDied], "it was ready once: no setting is wrong"


def test_while_the_last_one_starts_the_others_may_hang() -> None:
    group = starting()
    replaced = ticks(group, 1001.0, 1040.0)
    assert set(replaced) == {FRONTEND}, "not the worker that starts in silence"


def test_the_time_for_the_start_begins_anew_with_the_life_that_is_waited_for() -> None:
    group = starting()
    die(group, OTHER, 1050.0)
    assert not any(isinstance(effect, GiveUp) for effect in group.handle(Tick(), 1070.0))
    (end,) = [effect for effect in group.handle(Tick(), 1111.0) if isinstance(effect, GiveUp)]
    assert "worker/1" in end.message
    assert "worker/0" not in end.message


def test_restart_at_once_then_with_backoff_then_give_up() -> None:
    group = started(max_restarts=2)
    ready(group, FRONTEND)
    ready(group, WORKER)
    first = die(group, WORKER, 1002.0)
    assert [type(effect) for effect in first] == [TellDied, Spawn]
    assert [type(effect) for effect in die(group, WORKER, 1003.0)] == [TellDied]
    assert group.handle(Tick(), 1003.05) == []
    assert [type(effect) for effect in group.handle(Tick(), 1003.2)] == [Spawn]
    assert isinstance(die(group, WORKER, 1004.0)[0], GiveUp)


def test_deaths_with_requests_end_no_mesh() -> None:
    """One of them may have done it, and whoever places them again finds it. Those without any count as ever."""
    group = started(max_restarts=2)
    ready(group, FRONTEND)
    ready(group, WORKER)
    for number in range(20):
        now = 1002.0 + number * 2.0
        process = group.processes[WORKER]
        effects = group.handle(Exited(WORKER, process.incarnation, -11, has_requests=True), now)
        effects += [] if len(effects) > 1 else group.handle(Tick(), process.restart_at)
        assert [type(effect) for effect in effects] == [TellDied, Spawn]
        ready(group, WORKER, process.restart_at)
        group.check()
    died = [die(group, WORKER, 1060.0 + number) + group.handle(Tick(), 1060.9 + number) for number in range(3)]
    assert [isinstance(effects[0], GiveUp) for effects in died] == [False, False, True]


def test_a_loop_of_slow_starts_that_fail_alike_ends_too() -> None:
    """Each takes minutes, so that never many deaths are within one window."""
    group = started(max_restarts=2)
    ready(group, FRONTEND)
    ready(group, WORKER)
    now = 1010.0
    die(group, WORKER, now)  # it did its job

    def fail(text: str) -> list[Effect]:
        nonlocal now
        now += 100.0
        group.handle(SaidFailed(WORKER, group.processes[WORKER].incarnation, text), now)
        effects = die(group, WORKER, now)
        now += 100.0
        return [*effects, *group.handle(Tick(), now)]

    said = ("cut short", "cut short", "no memory", "no memory", "cut short", "cut short")
    for text in said:
        assert not any(isinstance(effect, GiveUp) for effect in fail(text)), text
        group.check()
    ready(group, WORKER, now)
    die(group, WORKER, now + 5.0)
    for _ in range(2):
        assert not any(isinstance(effect, GiveUp) for effect in fail("cut short")), "it had done its job again"
        group.check()
    assert fail("cut short") == [
        GiveUp("worker/0 died 3 times in a row before it was ready, each time with: cut short")
    ]


def test_the_end_by_a_mapped_file_that_was_cut_short_says_so() -> None:
    group = started()
    ready(group, FRONTEND)
    (end,) = group.handle(Exited(WORKER, group.processes[WORKER].incarnation, -7), 1001.0)
    assert isinstance(end, GiveUp)
    assert end.message.startswith("worker/0 ended without a word (signal 7: a mapped file, of weights")


def test_no_backoff_for_a_process_that_had_done_its_job() -> None:
    group = started(max_restarts=20)
    ready(group, FRONTEND)
    ready(group, WORKER)
    now = 1002.0
    for _ in range(8):
        now += 4.0
        assert [type(effect) for effect in die(group, WORKER, now)] == [TellDied, Spawn]
        ready(group, WORKER, now)


def test_late_news_of_an_earlier_life_is_ignored() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    old = group.processes[WORKER].incarnation
    die(group, WORKER, 1002.0)
    assert group.handle(Exited(WORKER, old, -9), 1003.0) == []
    assert group.processes[WORKER].state is State.STARTING


def test_frontends_stop_first() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    assert group.handle(Stop(), 1002.0) == [AskToStop(FRONTEND)]
    assert die(group, FRONTEND, 1003.0) == [AskToStop(WORKER)]
    assert die(group, WORKER, 1004.0) == [AllStopped()]


def test_what_finishing_requests_need_is_started_again() -> None:
    group = running()
    assert group.handle(Stop(), 1010.0) == [AskToStop(FRONTEND)]
    assert [type(effect) for effect in die(group, WORKER, 1011.0)] == [TellDied, Spawn]
    assert [type(effect) for effect in die(group, WORKER, 1012.0)] == [TellDied, Spawn]
    assert [type(effect) for effect in die(group, WORKER, 1012.1)] == [TellDied]
    assert [type(effect) for effect in group.handle(Tick(), 1013.0)] == [Spawn]
    assert die(group, WORKER, 1013.1) == [], "too often: nothing is left to give up but this one"
    assert die(group, FRONTEND, 1014.0) == [AllStopped()]


def test_who_is_to_be_started_again_when_the_mesh_stops_is_if_requests_need_it() -> None:
    for needed in (True, False):
        group = running()
        die(group, WORKER, 1002.0)
        die(group, WORKER, 1002.0)
        assert group.processes[WORKER].state is State.BACKOFF
        if not needed:
            die(group, FRONTEND, 1002.0)
            die(group, FRONTEND, 1002.0)
        assert group.handle(Stop(), 1002.0) == ([AskToStop(FRONTEND)] if needed else [AllStopped()])
        assert [type(effect) for effect in group.handle(Tick(), 1003.0)] == ([Spawn] if needed else [])
        group.check()


def test_one_that_hangs_while_requests_finish_is_replaced() -> None:
    group = running()
    group.handle(Stop(), 1001.0)
    replaced: set[Identity] = set()
    for tenth in range(200):
        effects = group.handle(Tick(), 1001.0 + tenth / 10)
        replaced |= {effect.identity for effect in effects if isinstance(effect, Replace)}
    assert replaced == {WORKER}, "a frontend has its time for finishing"


def beat(group: Group, identity: Identity, now: float, step: int = 0, phase: str = "idle") -> None:
    group.handle(Beaten(identity, group.processes[identity].incarnation, step, phase), now)


def ticks(group: Group, begin: float, end: float, step: int = 0, phase: str = "idle") -> dict[Identity, float]:
    """Ticks and beats of the worker, not of the frontend; who is replaced, and when."""
    found: dict[Identity, float] = {}
    for tenth in range(int((end - begin) * 10)):
        now = begin + tenth / 10
        if tenth % 5 == 0:
            beat(group, WORKER, now, step, phase)
        for effect in group.handle(Tick(), now):
            if isinstance(effect, Replace):
                found.setdefault(effect.identity, now - begin)
    return found


def test_a_silent_process_is_replaced_within_the_stall_timeout() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    found = ticks(group, 1001.0, 1015.0)
    assert found.keys() == {FRONTEND}
    assert 10.0 <= found[FRONTEND] <= 10.3


def test_a_step_that_does_not_end_is_replaced() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    found = ticks(group, 1001.0, 1130.0, 7, "stepping")
    assert 120.0 <= found[WORKER] <= 120.5
    assert WORKER not in ticks(group, 1130.0, 1135.0, 8, "stepping")


def test_a_worker_that_is_idle_or_loads_for_long_is_not_stuck() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    assert WORKER not in ticks(group, 1001.0, 1300.0, 7, "idle")
    die(group, WORKER, 1300.0)
    assert WORKER not in ticks(group, 1300.0, 1600.0, 0, "weights")


def test_a_restarted_process_that_hangs_before_it_is_ready_is_replaced_too() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    die(group, FRONTEND, 1002.0)
    found = ticks(group, 1002.0, 1070.0)
    assert 60.0 <= found[FRONTEND] <= 60.3


def test_nobody_is_replaced_because_the_supervisor_slept() -> None:
    group = started()
    ready(group, FRONTEND)
    ready(group, WORKER)
    group.handle(Tick(), 1001.1)
    assert group.handle(Tick(), 1501.0) == []
    assert group.handle(Tick(), 1501.1) == []


def test_a_start_that_takes_too_long_names_who_is_late() -> None:
    group = started()
    ready(group, FRONTEND)
    (effect,) = group.handle(Tick(), 1061.0)
    assert isinstance(effect, GiveUp)
    assert "worker/0" in effect.message
    assert "frontend/0" not in effect.message


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_history_breaks_the_invariants(data: st.DataObject) -> None:
    group = started(max_restarts=data.draw(st.integers(0, 3)))
    now, incarnations = 1000.0, set()
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.05, 1.0, 20.0]))
        action = data.draw(
            st.sampled_from(["ready", "ready", "die", "tick", "tick", "stop", "add", "retire", "drained"])
        )
        identity = data.draw(st.sampled_from(list(group.processes)))
        alive = group.processes[identity].state not in (State.BACKOFF, State.STOPPED)
        if action in ("add", "retire"):
            is_there = NEW in group.processes
            if not group.was_ready or group.stopping or group.changing or is_there is (action == "add"):
                continue
            event = Retire((NEW, OTHER), now + 30.0) if is_there else Add((NEW, OTHER))
            effects = group.handle(event, now)
        elif action == "drained":
            effects = group.handle(Drained((NEW, OTHER)), now)
        elif action == "tick":
            effects = group.handle(Tick(), now)
        elif action == "stop":
            effects = group.handle(Stop(), now)
        elif alive:
            effects = ready(group, identity, now) if action == "ready" else die(group, identity, now)
        else:
            effects = []
        for effect in effects:
            if isinstance(effect, Spawn):
                assert effect.incarnation not in incarnations
                incarnations.add(effect.incarnation)
        group.check()


def leading() -> Group:
    """A group with which the whole mesh ends."""
    group = Group([FRONTEND, WORKER, OTHER], 3, 60.0, ends_steps=True)
    group.handle(Start(), 1000.0)
    return group


def test_steps_end_between_the_frontends_and_everybody_else() -> None:
    """A worker that ends while the others wait for it in a step leaves them in it."""
    group = leading()
    for identity in (FRONTEND, WORKER, OTHER):
        ready(group, identity)
    assert group.handle(Stop(), 1002.0) == [AskToStop(FRONTEND)]
    assert die(group, FRONTEND, 1003.0) == [EndSteps()]
    assert die(group, OTHER, 1003.5) == [], "nobody is asked twice, and nobody is started again"
    assert group.handle(StepsEnded(), 1004.0) == [AskToStop(WORKER)]
    assert die(group, WORKER, 1005.0) == [AllStopped()]
    group.check()


def test_a_mesh_that_never_served_has_no_steps_to_end() -> None:
    group = leading()
    ready(group, FRONTEND)
    assert group.handle(Stop(), 1002.0) == [AskToStop(FRONTEND)]
    assert die(group, FRONTEND, 1003.0) == [AskToStop(WORKER), AskToStop(OTHER)]


def test_processes_that_are_gone_need_no_end_of_steps() -> None:
    group = leading()
    for identity in (FRONTEND, WORKER, OTHER):
        ready(group, identity)
    group.handle(Stop(), 1002.0)
    die(group, FRONTEND, 1003.0)
    die(group, OTHER, 1003.5)
    assert die(group, WORKER, 1003.6) == [AllStopped()]
    assert group.handle(StepsEnded(), 1004.0) == []
