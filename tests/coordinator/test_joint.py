"""Joint steps over a network that loses, delays and repeats, with ranks and coordinators that die."""

import random
from dataclasses import dataclass, field

import pytest

from meshlm.coordinator.joint import JointGroup, State
from meshlm.protocol.lockstep import JointOrder, JointRank, JointReport
from meshlm.protocol.wire.ids import Epoch, Incarnation
from meshlm.runtime.process.events import Send


def order_of(send: Send) -> JointOrder:
    assert isinstance(send.message, JointOrder)
    return send.message


# --- by hand ---


class Bench:
    """A group and its ranks, with a network that loses nothing."""

    def __init__(self, num_ranks: int) -> None:
        self.group = JointGroup(num_ranks, 100)
        self.ranks = [JointRank() for _ in range(num_ranks)]
        for number in range(num_ranks):
            self.tell(self.group.join(number, Incarnation(1)))

    def state(self) -> State:
        return self.group.state

    def tell(self, effects: list[Send]) -> None:
        while effects:
            effects = [tell for effect in effects for tell in self.report(effect.to.index, order_of(effect))]

    def report(self, number: int, order: JointOrder | None = None) -> list[Send]:
        rank = self.ranks[number]
        report = rank.follow(order) if order is not None else rank.report()
        effects = self.group.report(number, Incarnation(1), report)
        self.group.check()
        return effects

    def work(self, number: int, has_work: bool) -> None:
        self.ranks[number].has_work = has_work
        self.tell(self.report(number))


def test_idle_ranks_step_with_one_that_has_work_and_all_stop_with_the_same_step() -> None:
    bench = Bench(3)
    assert bench.state() is State.IDLE
    assert not any(rank.may_begin() for rank in bench.ranks)
    bench.work(1, True)
    assert bench.state() is State.STEPPING
    assert {rank.begin() for rank in bench.ranks} == {1}
    for rank in bench.ranks:
        assert rank.finish(rank.epoch)
    bench.ranks[0].begin()  # ahead of the others
    bench.work(1, False)
    assert bench.state() is State.DRAINING
    assert [rank.may_begin() for rank in bench.ranks] == [False, True, True], "they must meet the first in step 2"
    for rank in bench.ranks[1:]:
        rank.begin()
    for number, rank in enumerate(bench.ranks):
        rank.finish(rank.epoch)
        bench.tell(bench.report(number))
    assert (bench.group.state, {rank.step for rank in bench.ranks}) == (State.IDLE, {2})


def test_a_lost_member_aborts_the_step_and_its_return_makes_a_new_epoch() -> None:
    bench = Bench(2)
    bench.work(0, True)
    epoch = bench.ranks[0].epoch
    bench.ranks[0].begin()
    bench.tell(bench.group.lose(1, Incarnation(1)))
    assert (bench.group.state, bench.group.reason) == (State.PAUSED, "rank 1 is missing")
    assert not bench.ranks[0].may_begin()
    assert not bench.ranks[0].finish(epoch), "aborted"
    bench.ranks[1] = JointRank()
    effects = bench.group.join(1, Incarnation(2))
    while effects:
        answers = [(one.to.index, bench.ranks[one.to.index].follow(order_of(one))) for one in effects]
        incarnations = (Incarnation(1), Incarnation(2))
        effects = [e for rank, said in answers for e in bench.group.report(rank, incarnations[rank], said)]
    assert bench.state() is State.STEPPING
    assert bench.ranks[0].epoch == bench.ranks[1].epoch > epoch


def test_a_pause_drains_and_says_why() -> None:
    bench = Bench(2)
    bench.work(0, True)
    bench.tell(bench.group.pause("new weights"))
    assert (bench.group.state, bench.group.reason) == (State.PAUSED, "new weights")
    bench.work(1, True)
    assert bench.state() is State.PAUSED
    bench.tell(bench.group.resume())
    assert bench.state() is State.STEPPING


def test_old_orders_are_not_followed() -> None:
    bench = Bench(2)
    bench.work(0, True)
    stale = bench.group.order
    bench.tell(bench.group.pause("x"))
    before = bench.ranks[0].report()
    assert bench.ranks[0].follow(stale) == before
    fresh = JointRank()
    assert fresh.follow(stale).epoch == 0, "a rank that never prepared does not step"


# --- any network ---


@dataclass
class Member:
    """One incarnation of a rank: its rules, and how many jobs it still has."""

    incarnation: Incarnation
    jobs: int
    rank: JointRank = field(default_factory=JointRank)


class Net:
    """Messages in flight, in no order; `tidy` ends the faults."""

    def __init__(self, seed: int, num_ranks: int) -> None:
        self.dice = random.Random(seed)
        self.num_ranks, self.num_started, self.tidy = num_ranks, 0, False
        self.present: dict[int, Member] = {}
        self.flight: list[tuple[int, Incarnation, JointOrder | JointReport, int]] = []
        self.num_coordinators = 0
        self.num_empty = self.done = 0
        self.start_coordinator()
        for number in range(num_ranks):
            self.start(number)

    def start_coordinator(self) -> None:
        """A new incarnation: it knows who is there, and nothing else."""
        self.num_coordinators += 1
        self.group = JointGroup(self.num_ranks, self.num_coordinators << 32)
        for number, one in self.present.items():
            self.tell(self.group.join(number, one.incarnation))

    def start(self, number: int) -> None:
        self.num_started += 1
        self.present[number] = one = Member(Incarnation(self.num_started), self.dice.randrange(4))
        self.tell(self.group.join(number, one.incarnation))

    def kill(self, number: int) -> None:
        one = self.present.pop(number)
        self.tell(self.group.lose(number, one.incarnation))

    def tell(self, effects: list[Send]) -> None:
        self.group.check()
        for effect in effects:
            self.put(effect.to.index, order_of(effect))

    def put(self, number: int, message: JointOrder | JointReport) -> None:
        copies = 1 if self.tidy else self.dice.choice((0, 1, 1, 1, 2))
        one = self.present.get(number)
        if one is not None:
            self.flight += [(number, one.incarnation, message, self.num_coordinators)] * copies

    def deliver(self) -> None:
        number, incarnation, message, coordinator = self.flight.pop(self.dice.randrange(len(self.flight)))
        one = self.present.get(number)
        if one is None or one.incarnation != incarnation:
            return
        if isinstance(message, JointOrder):
            self.put(number, one.rank.follow(message))
        elif coordinator == self.num_coordinators:
            self.tell(self.group.report(number, incarnation, message))

    def step(self) -> None:
        """Some rank begins a step, or finishes one that all its members have begun."""
        number = self.dice.choice(list(self.present))
        one = self.present[number]
        rank = one.rank
        if rank.may_begin():
            self.num_empty += not one.jobs
            rank.begin()
        elif rank.finished < rank.step and all(
            self.in_step(rank, peer, incarnation) for peer, incarnation in rank.members
        ):
            rank.finish(rank.epoch)
            if one.jobs:
                one.jobs -= 1
                self.done += 1
            rank.has_work = one.jobs > 0

    def in_step(self, rank: JointRank, number: int, incarnation: Incarnation) -> bool:
        peer = self.present.get(number)
        return (
            peer is not None
            and peer.incarnation == incarnation
            and peer.rank.epoch == rank.epoch
            and peer.rank.step >= rank.step
        )

    def tick(self) -> None:
        self.tell(self.group.tick())
        for number, one in self.present.items():
            one.rank.has_work = one.jobs > 0
            self.put(number, one.rank.report())

    def check(self) -> None:
        stepping: dict[Epoch, list[int]] = {}
        for number, one in self.present.items():
            if one.rank.may_begin() or one.rank.finished < one.rank.step:
                stepping.setdefault(one.rank.epoch, []).append(number)
        assert len(stepping) <= 1, f"ranks step in different epochs: {stepping}"
        for epoch in stepping:
            steps = [one.rank.step for one in self.present.values() if one.rank.epoch == epoch]
            assert max(steps) - min(steps) <= 1, "one is ahead by more than the step that it waits in"


@pytest.mark.parametrize("seed", range(150))
def test_no_two_ranks_step_in_different_epochs_and_all_work_is_done(seed: int) -> None:
    net = Net(seed, 1 + seed % 5)
    dice = net.dice
    for _ in range(dice.randrange(600)):
        action = dice.random()
        number = dice.randrange(net.num_ranks)
        if action < 0.45 and net.flight:
            net.deliver()
        elif action < 0.75 and net.present:
            net.step()
        elif action < 0.9:
            net.tick()
        elif action < 0.92 and number in net.present:
            net.kill(number)
        elif action < 0.94 and number not in net.present:
            net.start(number)
        elif action < 0.945:
            net.start_coordinator()
        elif action < 0.96:
            net.tell(net.group.pause("weights" if dice.random() < 0.5 else ""))
        elif action < 0.97 and number in net.present:
            net.present[number].jobs += 1
        net.check()
    net.tidy = True
    net.tell(net.group.resume())
    for number in range(net.num_ranks):
        if number not in net.present:
            net.start(number)
    for _ in range(200):
        net.tick()
        while net.flight:
            net.deliver()
            net.check()
        for _ in range(8 * net.num_ranks):
            net.step()
            net.check()
        if not any(one.jobs for one in net.present.values()) and net.group.state is State.IDLE:
            break
    assert not any(one.jobs for one in net.present.values()), f"work is left: {net.group.state} {net.group.reason}"
    assert net.group.state is State.IDLE


def test_idle_ranks_run_empty_batches() -> None:
    net = Net(1, 3)
    net.tidy = True
    net.present[0].jobs, net.present[1].jobs, net.present[2].jobs = 20, 0, 0
    for _ in range(100):
        net.tick()
        while net.flight:
            net.deliver()
        for _ in range(6):
            net.step()
    assert net.num_empty >= 40
