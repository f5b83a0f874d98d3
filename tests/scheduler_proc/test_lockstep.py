"""Ranks that step together: the coordinator's and the schedulers' ends, with workers that compute a step only when all are at it."""

import random
from collections import deque

import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, VOCAB, Model, limits, reference

from meshlm.coordinator.joint import JointGroup, State
from meshlm.protocol.edges.admit import Assign, EngineRequest, Load
from meshlm.protocol.edges.step import Reset, StepPlan, WorkerReady
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.lockstep import JointReport, StepGroup
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send, Tick
from meshlm.scheduler_proc.core import Scheduler

NUM_BLOCKS, BLOCK_SIZE = 64, 4


class Rank:
    """A scheduler and its worker, and what came out for the detokenizer."""

    def __init__(self, number: int) -> None:
        self.worker = Identity(Role.WORKER, number)
        self.core = Scheduler(limits(lockstep=True, first_worker=number))
        self.model = Model(NUM_BLOCKS, BLOCK_SIZE)
        self.incarnation = Incarnation(0)  # of the worker; 0: it is not there
        self.group: StepGroup | None = None
        self.plans: deque[StepPlan] = deque()
        self.num_plans = self.num_empty = self.num_sessions = 0
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.serving = False  # as the coordinator knows it
        self.meets = True  # its worker finds those of the other ranks


class Net:
    """Messages arrive at once; steps are computed when `step` is called."""

    def __init__(self, num_ranks: int = 2, first_epoch: int = 1) -> None:
        self.now = 1.0
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.coordinator = JointGroup(num_ranks, first_epoch)
        for rank in self.ranks:
            self.tell(rank, PeerUp(DETOKENIZER, LIFE))
            self.tell(rank, PeerUp(COORDINATOR, LIFE))

    def tell(self, rank: Rank, event: Received | PeerUp | PeerLost | Tick) -> None:
        self.now += 0.001
        self.take(rank, rank.core.handle(event, self.now))
        rank.core.check()
        while sends := rank.core.plan(int(self.now * 1e9)):
            self.take(rank, sends)
        self.take(rank, rank.core.report())

    def take(self, rank: Rank, sends: list[Send]) -> None:
        for send in sends:
            match send.message:
                case JointReport() as report:
                    identity = Identity(Role.SCHEDULER, self.ranks.index(rank))
                    self.order(self.coordinator.reported(identity, report))
                case Reset() as reset if rank.incarnation:
                    rank.plans.clear()
                    rank.model.rows.clear()
                    rank.group = reset.group
                    rank.num_sessions += 1
                    if not rank.meets:
                        continue
                    facts = WorkerReady(reset.session, NUM_BLOCKS, BLOCK_SIZE, 64, 64, VOCAB)
                    self.tell(rank, Received(rank.worker, rank.incarnation, facts))
                case Load() as load:
                    rank.serving = load.serving
                case StepPlan() as plan:
                    assert rank.group is not None, "a step without the others"
                    rank.plans.append(plan)
                    rank.num_plans += 1
                    rank.num_empty += not plan.rows
                case TokenDeltas() as deltas:
                    rank.tokens += ints(deltas.token_ids)
                    for end in deltas.ended:
                        rank.reason = end.reason

    def order(self, sends: list[Send]) -> None:
        self.coordinator.check()
        for send in sends:
            self.tell(self.ranks[send.to.index], Received(COORDINATOR, LIFE, send.message))

    def start(self, number: int) -> None:
        rank = self.ranks[number]
        rank.incarnation = Incarnation(int(self.now * 1e9))
        rank.model = Model(NUM_BLOCKS, BLOCK_SIZE)
        self.tell(rank, PeerUp(rank.worker, rank.incarnation))

    def kill(self, number: int) -> None:
        rank = self.ranks[number]
        incarnation, rank.incarnation, rank.group = rank.incarnation, Incarnation(0), None
        rank.plans.clear()
        self.tell(rank, PeerLost(rank.worker, incarnation))

    def assign(self, number: int, prompt: list[int], max_tokens: int) -> None:
        name = RequestId(f"r{number}")
        work = EngineRequest(name, Handle(number), pack_i32(prompt), SamplingParams(max_tokens=max_tokens))
        self.tell(self.ranks[number], Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    def pass_by(self, seconds: int) -> None:
        """Nothing happens for so long."""
        for _ in range(seconds):
            self.now += 1.0
            for rank in self.ranks:
                self.tell(rank, Tick(0.0))

    def step(self) -> bool:
        """All ranks compute one step, if all of one group are at it."""
        if not all(rank.plans for rank in self.ranks) or len({rank.group for rank in self.ranks}) > 1:
            return False
        results = [(rank, rank.model.run(rank.plans.popleft())) for rank in self.ranks]
        for rank, result in results:
            self.tell(rank, Received(rank.worker, rank.incarnation, result))
        return True

    def run(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("they never rest")


def test_ranks_that_never_meet_are_not_ready() -> None:
    """Nor are those that do not meet again: a green /ready means that a token can be made."""
    net = Net()
    for rank in net.ranks:
        rank.meets = False
    for number in range(2):
        net.start(number)
    net.pass_by(60)
    assert [rank.serving for rank in net.ranks] == [False, False]
    for rank in net.ranks:
        rank.meets = True
    for number in range(2):
        net.kill(number)
        net.start(number)
    assert [rank.serving for rank in net.ranks] == [True, True]
    net.pass_by(600)
    for rank in net.ranks:
        rank.meets = False
    net.kill(1)
    net.start(1)
    assert net.ranks[0].serving, "they will meet again: its requests wait where they are"
    net.pass_by(60)
    assert not net.ranks[0].serving


def started(num_ranks: int = 2) -> Net:
    net = Net(num_ranks)
    for number in range(num_ranks):
        net.start(number)
    return net


def test_a_rank_without_work_steps_along() -> None:
    net = started()
    net.assign(0, [1, 2, 3], 20)
    net.run()
    busy, idle = net.ranks
    assert busy.tokens == reference([1, 2, 3], 20)
    assert busy.reason is FinishReason.LENGTH
    assert busy.num_plans == idle.num_plans == idle.num_empty >= 20
    assert net.coordinator.state is State.IDLE


def test_work_after_a_rest_needs_no_new_communicators() -> None:
    net = started()
    net.assign(0, [1, 2, 3], 20)
    net.run()
    before = [(rank.num_sessions, rank.group) for rank in net.ranks]
    net.assign(1, [4, 5], 9)
    net.run()
    assert net.ranks[1].tokens == reference([4, 5], 9)
    assert [(rank.num_sessions, rank.group) for rank in net.ranks] == before


def test_none_steps_before_all_are_there() -> None:
    net = Net()
    net.start(0)
    net.assign(0, [1, 2, 3], 5)
    net.tell(net.ranks[0], Tick(1.0))
    assert net.ranks[0].num_plans == 0
    load = net.ranks[0].core.load.load(net.ranks[0].core.batching, True, 0)
    assert load is None or load.serving
    net.start(1)
    net.run()
    assert net.ranks[0].tokens == reference([1, 2, 3], 5)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_in_the_middle(victim: int) -> None:
    net = started()
    for number in range(2):
        net.assign(number, [number, 7], 30)
    for _ in range(9):
        assert net.step()
    epoch = net.coordinator.order.epoch
    survivor = net.ranks[1 - victim]
    assert survivor.plans, "its step is under way"
    net.kill(victim)
    assert net.coordinator.order.epoch > epoch
    assert (list(survivor.plans), survivor.group) == ([], None), "aborted"
    assert not net.step()
    net.start(victim)
    net.run()
    assert [rank.tokens for rank in net.ranks] == [reference([number, 7], 30) for number in range(2)]


def test_the_coordinator_is_replaced_in_the_middle() -> None:
    net = started()
    for number in range(2):
        net.assign(number, [number, 7], 30)
    for _ in range(9):
        assert net.step()
    net.coordinator = JointGroup(2, 1000)
    for rank in net.ranks:
        net.tell(rank, PeerUp(COORDINATOR, LIFE))
    net.run()
    assert [rank.tokens for rank in net.ranks] == [reference([number, 7], 30) for number in range(2)]


def test_a_dense_rank_has_no_part_in_it() -> None:
    assert Scheduler(limits()).lockstep is None


@pytest.mark.parametrize("seed", range(100))
def test_any_deaths(seed: int) -> None:
    """Workers die and come, at any moment; all tokens are those of an undisturbed run."""
    dice = random.Random(seed)
    net = Net(dice.randint(1, 3))
    asked: dict[int, tuple[list[int], int]] = {}
    for _ in range(150):
        number, action = dice.randrange(len(net.ranks)), dice.random()
        if action < 0.8:
            net.step()
        elif action < 0.9:
            net.tell(net.ranks[number], Tick(1.0))
        elif action < 0.93 and net.ranks[number].incarnation and net.ranks[number].core.num_steps % 3:
            net.kill(number)
        elif action < 0.97 and not net.ranks[number].incarnation:
            net.start(number)
        elif number not in asked:
            asked[number] = ([number, dice.randrange(9)], dice.randint(1, 20))
            net.assign(number, *asked[number])
    for number, rank in enumerate(net.ranks):
        if not rank.incarnation:
            net.start(number)
    net.run()
    for number, (prompt, num_tokens) in asked.items():
        rank = net.ranks[number]
        if rank.reason is not FinishReason.ERROR:  # given up: too many deaths of its worker
            assert rank.tokens == reference(prompt, num_tokens)
    assert net.coordinator.state is State.IDLE
