"""Ranks whose pages move between their devices, a store and a connector; page_worker.py says what memory holds."""

from collections import deque
from typing import Any

from cache_subscriber import Subscriber
from kv_device import FULL
from page_store import PageStore
from page_worker import Slots, Worker, next_token

from meshlm.protocol.config import KVTransferConfig
from meshlm.protocol.edges.admit import AbortRequests, Assign, EngineRequest, Load
from meshlm.protocol.edges.kv import FindPages
from meshlm.protocol.edges.step import Reset, StepPlan
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.kv_events import hash_of
from meshlm.protocol.operations import CallWorkers, Operation, OperationId, ResetPrefixCache
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.limits import Limits

DETOKENIZER, STORE = Identity(Role.DETOKENIZER), Identity(Role.STORE)
CONNECTOR = "shelf"


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Ask:
    """A request of a client."""

    def __init__(self, prompt: list[int], salt: str, max_tokens: int) -> None:
        self.prompt, self.salt, self.max_tokens = prompt, salt, max_tokens
        self.tokens: list[int] = []
        self.attempt, self.rank, self.handle, self.is_over, self.arrival_s = 0, 0, 0, False, 0.0
        self.kv_transfer = b""


class World:
    """Schedulers, their workers, a store, and links whose messages arrive when `deliver` says so."""

    def __init__(
        self,
        num_ranks: int = 2,
        num_workers: int = 1,
        num_pages: int = 40,
        specs: tuple[KVSpec, ...] = (FULL,),
        store_pages: int = 0,
        connector: bool = False,
        **changes: Any,
    ) -> None:
        self.num_workers, self.num_pages, self.specs, self.now = num_workers, num_pages, specs, 1.0
        self.memory: dict[str, Slots] = {}
        self.shelves: list[dict[Any, list[object]]] = [{} for _ in range(num_workers)]
        self.salts: dict[tuple[int, int, int], str] = {}
        self.links: dict[tuple[Identity, Identity], deque[Any]] = {}
        self.asks: dict[str, Ask] = {}
        self.by_handle: dict[int, Ask] = {}
        self.handles = 0
        self.lives: dict[Identity, int] = {}
        self.failed: dict[str, str] = {}
        self.handed_off = 0
        self.config = KVTransferConfig(
            kv_offloading_size=1.0 if store_pages else None,
            connectors=(CONNECTOR,) if connector else (),
            num_prefill_ranks=1 if num_ranks > 1 else 0,
            **changes,
        )
        self.store = PageStore(self, store_pages) if store_pages else None
        self.cores: list[Scheduler] = []
        self.subscribers = [Subscriber() for _ in range(num_ranks)]
        self.workers: list[list[Worker]] = []
        for rank in range(num_ranks):
            first = rank * num_workers
            self.workers.append([Worker(self, Identity(Role.WORKER, first + n), 1) for n in range(num_workers)])
            self.cores.append(self._core(rank))
        for rank in range(num_ranks):
            self._meet(rank)
        self.settle()

    def _core(self, rank: int) -> Scheduler:
        limits = Limits(
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            num_workers=self.num_workers,
            first_worker=rank * self.num_workers,
            kv_transfer=self.config,
            kv_events=True,
        )
        return Scheduler(limits)

    def _meet(self, rank: int) -> None:
        """A scheduler that begins meets all others."""
        others = [Identity(Role.SCHEDULER, other) for other in range(len(self.cores)) if other != rank]
        stores = [STORE] if self.store is not None else []
        for peer in (DETOKENIZER, COORDINATOR, *others, *stores, *(one.identity for one in self.workers[rank])):
            self.event(rank, PeerUp(peer, self.life(peer)))

    def life(self, peer: Identity) -> Incarnation:
        return Incarnation(self.lives.get(peer, 1))

    # --- events ---

    def event(self, rank: int, event: Event) -> None:
        self.now += 0.001
        core = self.cores[rank]
        self._take(rank, core.handle(event, self.now))
        core.check()
        while sends := core.plan(int(self.now * 1e9)):
            plan = sends[0].message
            assert isinstance(plan, StepPlan)
            for request in core.batching.running:
                self.salts[plan.session, plan.step, request.row] = request.work.cache_salt
            self._take(rank, sends)
            core.check()
        self._take(rank, core.report())
        self._follow(rank)

    def _follow(self, rank: int) -> None:
        """Whoever follows the events of a rank's prefix cache believes in nothing that is not there."""
        subscriber, pool = self.subscribers[rank], self.cores[rank].batching.kv.pool
        subscriber.apply(self.cores[rank].kv_events())
        assert {name for name, _ in subscriber.known} <= set(map(hash_of, pool._cached))

    def _take(self, rank: int, sends: list[Send]) -> None:
        me = Identity(Role.SCHEDULER, rank)
        for send in sends:
            match send.message:
                case TokenDeltas() as deltas:
                    self._deltas(deltas)
                case Load() as load:
                    for one in load.returned:
                        ask = self.by_handle[one.handle]
                        if one.handed_off and ask.handle == one.handle:
                            self.handed_off += 1
                            self._assign(one.request_id, (rank + 1) % len(self.cores), holder=me)
                case _ if send.to.role is Role.COORDINATOR:
                    pass
                case _:
                    self.links.setdefault((me, send.to), deque()).append(send.message)

    def _deltas(self, deltas: TokenDeltas) -> None:
        handles, tokens = ints(deltas.handles), ints(deltas.token_ids)
        counts, at = ints(deltas.counts) or [1] * len(handles), 0
        for handle, start, count in zip(handles, ints(deltas.starts), counts, strict=True):
            ask = self.by_handle[handle]
            assert ask.handle == handle, "an attempt that was over"
            assert start == len(ask.tokens), "a token lost or repeated"
            ask.tokens += tokens[at : at + count]
            at += count
        for end in deltas.ended:
            ask = self.by_handle[handles[end.row]]
            assert not ask.is_over
            ask.is_over = True
            ask.kv_transfer = end.kv_transfer
            if end.reason is FinishReason.ERROR:
                self.failed[next(name for name, one in self.asks.items() if one is ask)] = end.message

    def ask(
        self,
        prompt: list[int],
        rank: int = 0,
        salt: str = "",
        max_tokens: int = 3,
        arrival_s: float | None = None,
        **assign: Any,
    ) -> str:
        name = f"r{len(self.asks)}"
        self.asks[name] = Ask(prompt, salt, max_tokens)
        self.asks[name].arrival_s = float(len(self.asks)) if arrival_s is None else arrival_s
        self._assign(name, rank, **assign)
        return name

    def _assign(self, name: str, rank: int, extras: Any = (), **assign: Any) -> None:
        ask = self.asks[name]
        self.handles += 1
        ask.rank, ask.handle, ask.attempt = rank, self.handles, ask.attempt + 1
        self.by_handle[ask.handle] = ask
        work = EngineRequest(
            RequestId(name),
            Handle(ask.handle),
            pack_i32(ask.prompt),
            SamplingParams(max_tokens=ask.max_tokens),
            attempt=ask.attempt,
            output_token_ids=pack_i32(ask.tokens),
            cache_salt=ask.salt,
            arrival_s=ask.arrival_s,
            extras=extras,
        )
        self.event(
            rank, Received(COORDINATOR, self.life(COORDINATOR), Assign(work, DETOKENIZER, Incarnation(1), **assign))
        )

    def abort(self, name: str) -> None:
        ask = self.asks[name]
        ask.is_over, ask.tokens = True, expected(ask.prompt, ask.max_tokens)
        self.event(ask.rank, Received(COORDINATOR, Incarnation(1), AbortRequests((RequestId(name),))))

    def operate(self, rank: int, name: str, *, calls: bool) -> None:
        action = CallWorkers("scale", b"{}") if calls else ResetPrefixCache(preempt=True)
        self.event(rank, Received(COORDINATOR, Incarnation(1), Operation(OperationId(name), action)))

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for rank in range(len(self.cores)):
            self.event(rank, Tick(self.now))
        if self.store is not None:
            self.store.tick()

    # --- links ---

    def waiting_links(self) -> list[tuple[Identity, Identity]]:
        return [link for link, messages in self.links.items() if messages]

    def deliver(self, link: tuple[Identity, Identity], *, again: bool = False) -> None:
        """The oldest message of a link arrives. again: and will arrive once more."""
        sender, to = link
        message = self.links[link][0] if again else self.links[link].popleft()
        if to.role is Role.WORKER:
            rank, nth = divmod(to.index, self.num_workers)
            self.workers[rank][nth].inbox.append(message)
        elif to.role is Role.STORE:
            assert self.store is not None
            for answer in self.store.take(sender, message):
                self.links.setdefault((STORE, sender), deque()).append(answer)
        else:
            self.event(to.index, Received(sender, self.life(sender), message))

    def _able(self, rank: int) -> list[Worker]:
        """The workers that can do the next thing that they were sent: steps all together, those of an earlier session by nobody."""
        heads = {worker: worker.inbox[0] for worker in self.workers[rank] if worker.inbox}
        able = [worker for worker, head in heads.items() if not isinstance(head, StepPlan)]
        steps = {worker: (head.session, head.step) for worker, head in heads.items() if worker not in able}
        for worker, step in list(steps.items()):
            if step[0] < max(head.session for head in worker.inbox if isinstance(head, StepPlan | Reset)):
                worker.inbox.popleft()
                return self._able(rank)
        return able or (list(steps) if len(steps) == self.num_workers and len(set(steps.values())) == 1 else [])

    def can_work(self, rank: int) -> bool:
        return bool(self._able(rank))

    def work(self, rank: int) -> None:
        for worker in self._able(rank):
            for answer in worker.take(worker.inbox.popleft()):
                self._say(worker, answer)

    def _say(self, worker: Worker, message: Any) -> None:
        link = worker.identity, Identity(Role.SCHEDULER, worker.identity.index // self.num_workers)
        self.links.setdefault(link, deque()).append(message)

    def copying(self) -> list[Worker]:
        return [worker for rank in self.workers for worker in rank if worker.copies]

    def copy(self, worker: Worker, *, fails: bool = False) -> None:
        for answer in worker.copy(fails=fails):
            self._say(worker, answer)

    # --- deaths ---

    def _cut(self, peer: Identity) -> None:
        for link in self.links:
            if peer in link:
                self.links[link].clear()
        self.lives[peer] = self.lives.get(peer, 1) + 1

    def kill_scheduler(self, rank: int) -> None:
        me = Identity(Role.SCHEDULER, rank)
        self._cut(me)
        for other in range(len(self.cores)):
            if other != rank:
                self.event(other, PeerLost(me, Incarnation(self.lives[me] - 1)))
        if self.store is not None:
            self.store.lost(me)
        self.cores[rank] = self._core(rank)
        self.now += 0.01
        for worker in self.workers[rank]:
            newest = max((one.session for one in worker.inbox if isinstance(one, Reset)), default=0)
            while worker.inbox:  # it does all that it was sent, but for steps that it can take with nobody
                message = worker.inbox.popleft()
                if not isinstance(message, FindPages) and (
                    not isinstance(message, StepPlan) or message.session >= newest
                ):
                    worker.take(message)
        self._meet(rank)
        for other in range(len(self.cores)):
            if other != rank:
                self.event(other, PeerUp(me, self.life(me)))
        for name, ask in self.asks.items():
            if ask.rank == rank and not ask.is_over:
                self._assign(name, rank)

    def kill_worker(self, rank: int, nth: int) -> None:
        worker = self.workers[rank][nth]
        self._cut(worker.identity)
        self.workers[rank][nth] = new = Worker(self, worker.identity, worker.incarnation + 1)
        self.event(rank, PeerLost(worker.identity, worker.incarnation))
        self.event(rank, PeerUp(new.identity, new.incarnation))

    def kill_store(self) -> None:
        assert self.store is not None
        self._cut(STORE)
        self.store = PageStore(self, self.store.num_pages)
        for rank in range(len(self.cores)):
            self.event(rank, PeerLost(STORE, Incarnation(self.lives[STORE] - 1)))
            self.event(rank, PeerUp(STORE, self.life(STORE)))

    # --- ends ---

    def settle(self) -> None:
        """All that is under way arrives, and is done."""
        for _ in range(20_000):
            links = self.waiting_links()
            if links:
                self.deliver(links[0])
            elif ready := [rank for rank in range(len(self.cores)) if self.can_work(rank)]:
                self.work(ready[0])
            elif copying := self.copying():
                self.copy(copying[0])
            else:
                return
        raise AssertionError("it never ends")

    def finish(self) -> None:
        """All requests end as they should, and nothing is kept once all leases have ended."""
        for _ in range(80):
            self.settle()
            self.tick()
        self.settle()
        for name, ask in self.asks.items():
            assert ask.is_over, f"{name} hangs"
            if name not in self.failed:
                assert ask.tokens == expected(ask.prompt, ask.max_tokens), name
        for core in self.cores:
            assert not core.requests
            assert not core.batching.kv.pool.leases, "a lease leaks"
            assert core.batching.kv.pool.num_free == self.num_pages, "a page leaks"
