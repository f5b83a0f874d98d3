"""Operators pause ranks that step together, and have them sleep: all after the same step, whatever dies; what ran goes on then.

The real coordinator and schedulers, with links that keep the order of messages and nothing else: hypothesis chooses what arrives next.
"""

from collections import deque

from bench import COORDINATOR, DETOKENIZER, LIFE, VOCAB, Model, limits, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from meshlm.coordinator.core import Coordinator
from meshlm.coordinator.joint import JointGroup, State
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import Assign, EngineRequest, Load, Welcome
from meshlm.protocol.edges.step import Reset, StepPlan, WorkerAsleep, WorkerReady
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.lockstep import JointOrder, JointReport, StepGroup
from meshlm.protocol.operations import Action, Operation, OperationDone, OperationId, Pause, Resume, Sleep, WakeUp
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import AWAKE, Sleeping
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import HEAD, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.scheduler_proc.core import Scheduler

NUM_BLOCKS, BLOCK_SIZE, NUM_RANKS, NUM_TOKENS = 64, 4, 2, 25
TO_COORDINATOR = (JointReport, Load, OperationDone)
TO_SCHEDULER = (JointOrder, Operation, Welcome)
ACTIONS = (
    "step",
    "deliver 0",
    "deliver 1",
    "settle",
    "tick",
    "kill",
    "start",
    "coordinator",
    "keep",
    "wait",
    "resume",
    "sleep",
    "wake",
)


def has_requests_run(action: Action) -> bool:
    return isinstance(action, Resume) or (isinstance(action, Pause) and action.wait)


class Rank:
    """A scheduler and its worker."""

    def __init__(self, number: int) -> None:
        self.identity, self.worker = Identity(Role.SCHEDULER, number), Identity(Role.WORKER, number)
        self.core = Scheduler(limits(lockstep=True, sleep_mode=True, first_worker=number))
        self.model = Model(NUM_BLOCKS, BLOCK_SIZE)
        self.incarnation = Incarnation(0)  # of the worker; 0: it is not there
        self.group: StepGroup | None = None
        self.sleeping = AWAKE
        self.plans: deque[StepPlan] = deque()
        self.num_steps = 0  # of its worker in this group
        self.tokens: list[int] = []
        self.to_coordinator: deque[Struct] = deque()
        self.orders: deque[Struct] = deque()  # the coordinator's


class Net:
    """Messages between schedulers and their workers arrive at once, those to and from the coordinator when `deliver` is called."""

    def __init__(self) -> None:
        self.now, self.num_lives, self.num_kills, self.num_asked = 1.0, 0, 0, 0
        self.ranks = [Rank(number) for number in range(NUM_RANKS)]
        self.answers: dict[str, str] = {}  # of operations: their errors
        self.asked: list[Operation] = []  # that are not answered
        self.paused = False  # the answer to a pause is there, and nobody has resumed
        self.begin_coordinator()
        for rank in self.ranks:
            self.tell(rank, PeerUp(DETOKENIZER, LIFE))
            self.start(rank)
            work = EngineRequest(
                RequestId(f"r{rank.worker.index}"), Handle(rank.worker.index), pack_i32([rank.worker.index, 7]),
                SamplingParams(max_tokens=NUM_TOKENS),
            )  # fmt: skip
            self.tell(rank, Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    # --- processes ---

    def begin_coordinator(self) -> None:
        self.num_lives += 1
        group = JointGroup(NUM_RANKS, self.num_lives << 20)
        self.coordinator = Coordinator(100, NUM_RANKS, lockstep=group, sleep_mode=True)
        for rank in self.ranks:
            rank.to_coordinator.clear()
            rank.orders.clear()
        for rank in self.ranks:
            member = control.Member(rank.identity, LIFE, "ipc:///x", True)
            self.say(rank.identity, control.Join(member))
            self.tell(rank, PeerUp(COORDINATOR, LIFE))
        for operation in self.asked:
            self.say(HEAD, operation)

    def start(self, rank: Rank) -> None:
        """Its worker, which holds nothing."""
        self.num_lives += 1
        rank.incarnation, rank.model, rank.sleeping = Incarnation(self.num_lives), Model(NUM_BLOCKS, BLOCK_SIZE), AWAKE
        self.tell(rank, PeerUp(rank.worker, rank.incarnation))

    def kill(self, rank: Rank) -> None:
        self.num_kills += 1
        incarnation, rank.incarnation, rank.group = rank.incarnation, Incarnation(0), None
        rank.plans.clear()
        self.tell(rank, PeerLost(rank.worker, incarnation))

    # --- messages ---

    def tell(self, rank: Rank, event: Event) -> None:
        self.now += 0.001
        self.take(rank, rank.core.handle(event, self.now))
        rank.core.check()
        while sends := rank.core.plan(int(self.now * 1e9)):
            self.take(rank, sends)
        self.take(rank, rank.core.report())

    def take(self, rank: Rank, sends: list[Send]) -> None:
        for send in sends:
            match send.message:
                case Reset() as reset if rank.incarnation:
                    self.reset(rank, reset)
                case StepPlan() as plan:
                    assert rank.group is not None, "a step without the others"
                    assert not rank.sleeping.tags, "a step in its sleep"
                    assert not (self.paused and plan.rows), "a request runs in a paused mesh"
                    rank.plans.append(plan)
                case TokenDeltas() as deltas:
                    rank.tokens += ints(deltas.token_ids)
                case message if isinstance(message, TO_COORDINATOR) and send.to == COORDINATOR:
                    rank.to_coordinator.append(message)

    def reset(self, rank: Rank, reset: Reset) -> None:
        if reset.sleeping not in (None, rank.sleeping):
            others_wait = len({one.group for one in self.ranks}) == 1 and rank.group is not None
            assert not (rank.plans and others_wait), "it leaves a step for which others wait"
            rank.sleeping, rank.model = reset.sleeping or AWAKE, Model(NUM_BLOCKS, BLOCK_SIZE)
        rank.plans.clear()
        rank.model.rows.clear()
        rank.group, rank.num_steps = reset.group, 0
        answer: Struct = WorkerReady(reset.session, NUM_BLOCKS, BLOCK_SIZE, 64, 64, VOCAB)
        if rank.sleeping.tags:
            answer = WorkerAsleep(reset.session, rank.sleeping)
        self.tell(rank, Received(rank.worker, rank.incarnation, answer))

    def say(self, sender: Identity, message: Struct) -> None:
        """To the coordinator."""
        self.hear(self.coordinator.handle(Received(sender, LIFE, message), self.now))

    def hear(self, sends: list[Send]) -> None:
        self.coordinator.check()
        for send in sends:
            if send.to.role is Role.SCHEDULER and isinstance(send.message, TO_SCHEDULER):
                if send.message in self.asked and isinstance(
                    send.message, Operation
                ):  # a newcomer is paused at any time
                    self.check_rest(send.message.action)
                self.ranks[send.to.index].orders.append(send.message)
            elif isinstance(send.message, OperationDone):
                self.answered(send.message)

    def answered(self, done: OperationDone) -> None:
        (operation,) = [one for one in self.asked if one.id == done.id]
        self.asked.remove(operation)
        self.answers[done.id] = done.error
        if isinstance(operation.action, Pause) and not operation.action.wait and not done.error:
            self.paused = not any(has_requests_run(one.action) for one in self.asked)

    def deliver(self, rank: Rank) -> bool:
        """The oldest message on one of the rank's links arrives."""
        if rank.to_coordinator:
            self.say(rank.identity, rank.to_coordinator.popleft())
        elif rank.orders:
            order = rank.orders.popleft()
            self.tell(rank, Received(COORDINATOR, LIFE, order))
        else:
            return False
        return True

    def check_rest(self, action: Action) -> None:
        """It is sent to ranks: those of the newest group have ended with the same step."""
        if isinstance(action, Sleep | WakeUp) or (isinstance(action, Pause) and not action.wait):
            stepping = [one for one in self.ranks if one.group and one.group.epoch == self.group.order.group]
            assert not any(one.plans for one in stepping), "a rank still steps"
            assert len({one.num_steps for one in stepping}) <= 1, "ranks do it after different steps"

    def settle(self) -> None:
        while any(self.deliver(rank) for rank in self.ranks):
            pass

    def ask(self, action: Action) -> str:
        self.num_asked += 1
        operation = Operation(OperationId(f"o{self.num_asked}"), action)
        self.asked.append(operation)
        if has_requests_run(action):
            self.paused = False
        self.say(HEAD, operation)
        return operation.id

    def tick(self) -> None:
        self.now += 1.0
        self.hear(self.coordinator.handle(Tick(0.0), self.now))
        for rank in self.ranks:
            self.tell(rank, Tick(0.0))

    def step(self) -> bool:
        """All ranks compute one step, if all of one group are at it."""
        if not all(rank.plans for rank in self.ranks) or len({rank.group for rank in self.ranks}) > 1:
            return False
        results = [(rank, rank.model.run(rank.plans.popleft())) for rank in self.ranks]
        for rank, _ in results:
            rank.num_steps += 1
        for rank, result in results:
            self.tell(rank, Received(rank.worker, rank.incarnation, result))
        return True

    def until_done(self) -> None:
        """What was asked is answered."""
        for _ in range(200):
            self.settle()
            if not self.asked:
                return
            if not self.step():
                self.tick()
        raise AssertionError(f"never answered: {self.asked}, {self.group.state} {self.group.reason}")

    @property
    def group(self) -> JointGroup:
        assert self.coordinator.lockstep is not None
        return self.coordinator.lockstep

    def end(self) -> None:
        """Whoever died is back, and an operator has it go on: each request gets what an undisturbed run gives."""
        for rank in self.ranks:
            if not rank.incarnation:
                self.start(rank)
        self.until_done()
        for action in (WakeUp(), Resume()):
            self.ask(action)
            self.until_done()
        for _ in range(200):
            self.settle()
            if not self.step() and all(len(rank.tokens) == NUM_TOKENS for rank in self.ranks):
                break
            self.tick()
        for rank in self.ranks:
            assert rank.tokens == reference([rank.worker.index, 7], NUM_TOKENS)
        self.settle()
        assert self.group.state is State.IDLE


def do(net: Net, action: str, dead: int) -> None:
    """One of ACTIONS. One worker dies once at most, so that its request is not given up."""
    victim = net.ranks[dead]
    match action:
        case "deliver 0" | "deliver 1":
            net.deliver(net.ranks[int(action[-1])])
        case "kill" if victim.incarnation and not net.num_kills:
            net.kill(victim)
        case "start" if not victim.incarnation:
            net.start(victim)
        case "coordinator":
            net.settle()  # what it was asked is known to all or to none: who asks asks again
            net.begin_coordinator()
        case "keep" | "wait":
            net.ask(Pause(wait=action == "wait"))
        case "resume":
            net.ask(Resume())
        case "sleep":
            net.ask(Sleep())
        case "wake":
            net.ask(WakeUp())
        case "step" | "settle" | "tick":
            getattr(net, action)()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=40), st.integers(0, 1))
def test_any_order_of_operations_and_deaths(actions: list[str], dead: int) -> None:
    net = Net()
    for action in actions:
        do(net, action, dead)
    net.end()


def started(num_steps: int) -> Net:
    net = Net()
    net.settle()
    for _ in range(num_steps):
        assert net.step()
        net.settle()
    return net


def test_a_pause_comes_after_the_same_step_of_all() -> None:
    net = started(5)
    name = net.ask(Pause())
    assert net.group.state is State.DRAINING
    net.until_done()
    assert net.answers[name] == ""
    counts = [len(rank.tokens) for rank in net.ranks]
    for _ in range(3):
        net.tick()
        net.settle()
        assert not net.step()
    assert [len(rank.tokens) for rank in net.ranks] == counts
    net.end()


def test_what_has_begun_may_come_to_its_end() -> None:
    net = started(5)
    net.ask(Pause(wait=True))
    net.settle()
    while net.step():
        net.settle()
    assert [len(rank.tokens) for rank in net.ranks] == [NUM_TOKENS] * NUM_RANKS
    assert net.group.state is State.IDLE
    net.end()


def test_a_worker_that_dies_in_its_sleep_comes_back_asleep() -> None:
    net = started(5)
    net.ask(Sleep())
    net.until_done()
    assert [rank.sleeping for rank in net.ranks] == [Sleeping(("weights", "kv_cache"), 1)] * NUM_RANKS
    assert "missing" in net.group.reason, "nobody who sleeps is a member"
    net.kill(net.ranks[1])
    net.settle()
    net.start(net.ranks[1])
    net.settle()
    assert net.ranks[1].sleeping.tags
    assert not any(rank.plans for rank in net.ranks)
    net.end()


def test_a_rank_that_is_paused_takes_part_in_the_steps_of_others() -> None:
    """Where one has resumed, and the others have not heard of it yet."""
    net = started(5)
    net.ask(Pause())
    net.until_done()
    first, second = net.ranks
    net.ask(Resume())
    had = len(second.tokens)
    while first.orders and net.deliver(first):
        pass
    late, second.orders = second.orders, deque(one for one in second.orders if not isinstance(one, Operation))
    net.settle()
    assert net.step()
    assert (len(second.tokens), len(first.tokens) > had) == (had, True)
    second.orders = deque([*late, *second.orders])
    net.end()
