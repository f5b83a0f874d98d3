"""KV pages that move, as the scheduler's core sees them: one object, told of every event, which loads, saves and leases.

Pure; owned by core.py, where pages move at all (KVTransferConfig.moves). All that concerns pages is of one session with the workers:
loads.py, saves.py, holder.py. What outlives it is here: which holders can be reached, the numbers of leases, and how quick copies are.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import count

from meshlm.protocol.edges.kv import (
    LEASE_S,
    NAMESPACE_BYTES,
    EndLease,
    FindPages,
    LeaseEnded,
    OpenPages,
    PagesFound,
    PagesMoved,
    PagesOpened,
    PagesTaken,
    PagesWanted,
)
from meshlm.protocol.edges.step import StepPlan, WorkerReady
from meshlm.protocol.operations import OperationId
from meshlm.protocol.wire.ids import FinishReason, Identity, Role, StepId
from meshlm.runtime.process.events import Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.scheduler_proc.connectors.holder import Holder
from meshlm.scheduler_proc.connectors.left import LeftPrompts
from meshlm.scheduler_proc.connectors.loads import ANSWER_NS, Loads
from meshlm.scheduler_proc.connectors.moves import Moves
from meshlm.scheduler_proc.connectors.rates import Rates
from meshlm.scheduler_proc.connectors.saves import Saves
from meshlm.scheduler_proc.connectors.session import STORE, PageSession
from meshlm.scheduler_proc.connectors.settled import Settled
from meshlm.scheduler_proc.connectors.sources import Connectors
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.request_table import RequestTable
from meshlm.scheduler_proc.states import RequestState


class _Session:
    """All that ends with a session with the workers."""

    def __init__(self, pages: PageSession, limits: Limits, rates: Rates) -> None:
        connectors, config = limits.kv_transfer.connectors, limits.kv_transfer
        self.pages = pages
        self.settled = Settled(pages.pool)
        self.moves = Moves(pages)
        by_request = () if config.transfer is None else (config.transfer.connector,)
        self.loads = Loads(pages, Connectors(connectors, by_request), rates, self.moves, self.settled)
        self.saves = Saves(pages, connectors, self.moves, self.settled)
        self.holder = Holder(pages, self.settled)
        self.left = None if config.transfer is None else LeftPrompts(pages, config, limits.secret)
        self.num_resets = pages.pool.num_resets

    def begun(self, request: Request) -> None:
        """A request gets a row."""
        self.loads.remove(request)
        if self.left is not None:
            self.left.begin(request)


class Transfers:
    """`table` has the requests; they wait for loads there, and end or leave there."""

    def __init__(self, table: RequestTable, limits: Limits, workers: list[Identity]) -> None:
        self._limits, self._config, self._table, self._workers = limits, limits.kv_transfer, table, workers
        self._session: _Session | None = None
        self._rates, self._numbers = Rates(), count(1)
        self._peers: set[Identity] = set()
        self._num_opening = 0  # OpenPages that the store has not answered: the last one counts
        self._opens_until_ns = 0  # a session's first step waits for it until then
        self._sends: list[Send] = []
        self.warnings: list[str] = []  # for the log: io.py takes them
        table.removed = self.removed

    # --- the session with the workers ---

    def begin(self, number: int, facts: Sequence[WorkerReady]) -> None:
        """All workers are ready; `facts` are in their order."""
        batching = self._table.batching
        moves = all(fact.page_bytes and fact.namespace == facts[0].namespace for fact in facts)
        if not (moves and facts[0].namespace and batching.kv.prefix_caching):
            self.warnings.append("the workers of this rank have no pages that can be moved, or different ones")
            return
        memory = tuple(fact.pages for fact in facts if fact.pages is not None)
        servers = tuple(fact.page_server for fact in facts if fact.page_server is not None)
        pages = PageSession(
            number=number,
            workers=self._workers,
            namespace=facts[0].namespace,
            page_bytes=tuple(fact.page_bytes for fact in facts),
            memory=memory if len(memory) == len(facts) else (),
            batching=batching,
            numbers=self._numbers,
            peers=self._peers,
            sends=self._sends,
            page_servers=servers if len(servers) == len(facts) else (),
        )
        self._session = session = _Session(pages, self._limits, self._rates)
        batching.begun = session.begun
        self._opens_until_ns = batching.now_ns + ANSWER_NS
        self._open_store()

    def _open_store(self) -> None:
        if self._session is not None and STORE in self._peers:
            pages = self._session.pages
            self._num_opening += 1
            pages.send(STORE, OpenPages(pages.namespace, pages.page_bytes))

    def holds_steps(self, now_ns: int) -> bool:
        """Whether a session is so new that the store has not answered it: what the workers before had lies there."""
        return self._num_opening > 0 and now_ns < self._opens_until_ns

    def end(self) -> None:
        """The session is over: its pages are gone, and requests look for theirs again in the next."""
        if self._session is not None:
            self._session.loads.end()
            self._session = None
        for request in self._table.by_id.values():
            request.load = None
            request.num_looks = request.pages_short = 0

    def rename(self, operation_id: OperationId) -> None:
        """The weights may be others from now on: what is computed has another namespace. Workers do the same."""
        if self._session is not None:
            pages = self._session.pages
            pages.namespace = sha256(pages.namespace + operation_id.encode()).digest()[:NAMESPACE_BYTES]

    # --- steps ---

    def planned(self, plan: StepPlan) -> None:
        """A step was planned."""
        if self._session is not None:
            self._session.settled.planned(plan)

    def computed(self, step: StepId) -> None:
        """The result of a step is here; it is about to be applied."""
        if self._session is not None:
            self._session.saves.add(self._session.settled.done(step))

    def removed(self, request: Request) -> None:
        """A request is about to leave the rank, and its blocks are still there."""
        session = self._session
        if session is None:
            return
        session.loads.remove(request)
        if session.left is not None and len(request.tokens) > request.num_given:
            session.left.leave(request, self._table.batching.now_ns)

    def _leave(self, request: Request, session: _Session) -> None:
        """Keeps the blocks of its prompt for whoever goes on with it."""
        until_ns = self._table.batching.now_ns + int(LEASE_S * 1e9)
        session.holder.leave(session.pages.kv.usable_hashes(request), until_ns)

    # --- events ---

    def handle(self, event: Event, output: Output) -> list[Send]:
        """Whatever happened, behind all else that it does."""
        session, now_ns = self._session, output.now_ns
        match event:
            case PeerUp(identity=peer) if peer.role in (Role.SCHEDULER, Role.STORE):
                self._peers.add(peer)
                if peer == STORE:
                    self._open_store()
            case PeerLost(identity=peer) if peer in self._peers:
                self._peers.discard(peer)
                if peer == STORE:
                    self._num_opening = 0
                if session is not None:
                    self._holder_lost(session, peer, now_ns)
            case Received() if session is not None:
                self._received(session, event, now_ns)
            case Received(message=PagesOpened()):
                self._num_opening -= 1
            case Received(sender=sender, message=EndLease(number=number)):
                self._sends.append(Send(sender, LeaseEnded(number, valid=False)))
            case Received(sender=sender, message=FindPages(number=number)):
                self._sends.append(Send(sender, PagesFound(number, b"")))
            case Tick() if session is not None:
                session.loads.tick(now_ns)
                session.holder.tick(now_ns)
                if session.left is not None:
                    session.left.tick(now_ns)
        if session is not None:
            self._go_on(session, output)
        self._table.leaving.clear()
        sends = list(self._sends)
        self._sends.clear()
        return sends

    def _holder_lost(self, session: _Session, peer: Identity, now_ns: int) -> None:
        if peer == STORE:
            session.pages.store = ()
            session.saves.store_lost()
        session.loads.lost(peer, now_ns)
        session.holder.lost(peer)

    def _received(self, session: _Session, event: Received, now_ns: int) -> None:
        sender = event.sender
        match event.message:
            case FindPages() as asked:
                session.holder.find(sender, asked, now_ns)
            case EndLease(number=number):
                session.holder.end(sender, number)
            case PagesFound() as found:
                session.loads.found(sender, found, now_ns)
            case LeaseEnded() as ended:
                session.loads.lease_ended(sender, ended)
            case PagesOpened() as opened:
                self._num_opening -= 1
                if opened.failed and not self._num_opening:
                    self.warnings.append(f"the store keeps no pages of this rank: {opened.failed}")
                can_read = len(opened.memory) == len(self._workers) and not (opened.failed or self._num_opening)
                session.pages.store = opened.memory if can_read else ()
            case PagesWanted() as wanted:
                session.saves.wanted(wanted, now_ns)
            case PagesTaken() as taken if session.left is not None:
                session.left.taken(sender, taken)
            case PagesMoved() as answer:
                if (move := session.moves.moved(sender, answer)) is not None:
                    session.loads.moved(move, now_ns)
                    session.saves.moved(move)

    def _go_on(self, session: _Session, output: Output) -> None:
        """What follows from what happened: resets, requests that leave or fail, and new loads and saves."""
        pool = session.pages.pool
        if session.num_resets != pool.num_resets:
            session.num_resets = pool.num_resets
            session.settled.reset()
            session.loads.reset()
            session.saves.reset()
            session.holder.reset()
        for request in self._table.leaving:
            if request.state is not RequestState.FINISHED and session.pages.memory:
                self._leave(request, session)
                self._table.hand_off(request)
        failures = session.loads.failures
        while failures:
            request, why = failures.pop()
            if self._config.load_failure_policy == "fail" and request.work.request_id in self._table.by_id:
                text = f"KV was not loaded (kv_load_failure_policy is fail): {why}"
                self._table.finish(request, output, FinishReason.ERROR, text)
        session.saves.offer(output.now_ns)
        if not self.holds_steps(output.now_ns):
            session.loads.look(output.now_ns)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        session = self._session
        if session is None:
            assert not any(request.load for request in self._table.by_id.values()), "a load of an earlier session"
            return
        session.loads.check()
        session.saves.check()
        leases = [*session.loads.leases(), *session.saves.leases(), *session.holder.leases()]
        leases += session.left.leases() if session.left is not None else []
        assert set(leases) == session.pages.pool.leases, "a lease that nobody ends"
        assert len(leases) == len(set(leases)), "a lease that two end"
