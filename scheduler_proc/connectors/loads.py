"""Loads: KV of requests that will start soon is looked for where it may lie, and brought into the prefix cache.

Pure; owned by transfers.py, for one session with the workers. What a load can be says load.py. Requests wait for one together, if one
of them wants what the other has asked for already.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from meshlm.protocol.edges.kv import EndLease, LeaseEnded, PagesFound
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.scheduler_proc.connectors.load import Load, LoadState, Source
from meshlm.scheduler_proc.connectors.moves import MOVE_NS, Move, Moves
from meshlm.scheduler_proc.connectors.rates import Rates
from meshlm.scheduler_proc.connectors.session import LEASE_NS, PageSession
from meshlm.scheduler_proc.connectors.settled import Settled
from meshlm.scheduler_proc.connectors.sources import Connectors, ask, sources_of, take_answer
from meshlm.scheduler_proc.kv.lease import Key, Lease
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import Wait

LOOK_AHEAD = 16  # requests of the queue whose KV is looked for
MIN_BLOCKS = 2  # fewer are computed, unless another has computed them for this request
MAX_LOOKS = 4  # for one request, while memory is short
ANSWER_NS = 2_000_000_000  # the most that a holder may take to answer
MOST_LOADED = 0.5  # share of the pool that loads hold before the next in the queue alone may have one


class Loads:
    """The loads of one session, in the order of asking."""

    def __init__(self, session: PageSession, connectors: Connectors, rates: Rates, moves: Moves, settled: Settled):
        self._session, self._rates, self._moves, self._settled = session, rates, moves, settled
        self._connectors = connectors
        self._requests: dict[Load, list[Request]] = {}  # those that wait for it, or the one for which it is kept
        self._sources: dict[int, tuple[Load, Source]] = {}  # by number, while it may answer
        self._moving: dict[int, tuple[Load, Source, list[Key]]] = {}  # by number of the move: the keys of its pages
        self._coming: dict[Key, Load] = {}  # what somebody waits for
        self.failures: list[tuple[Request, str]] = []  # requests whose load failed: transfers.py takes them
        session.kv.spare = self._spare

    # --- looking ---

    def look(self, now_ns: int) -> None:
        """Begins loads for the first of the queue."""
        for place, request in enumerate(self._session.batching.waiting[:LOOK_AHEAD]):
            if request.num_looks >= MAX_LOOKS:
                request.pages_short = 0  # it is computed
            elif request.load is None and self._is_due(request) and (place == 0 or self._has_room()):
                self._look_for(request, now_ns)

    def _has_room(self) -> bool:
        """Whether loads hold so few pages that there may be another for one that is not the next to start."""
        held = sum(len(load.lease.pages) for load in self._requests if load.lease is not None)
        return held <= MOST_LOADED * self._session.pool.num_blocks

    def _is_due(self, request: Request) -> bool:
        if request.num_looks and not (0 < request.pages_short <= self._session.pool.num_free):
            return False
        return request.work.reads_prefix_cache and request.waits is not Wait.RESULTS

    def _look_for(self, request: Request, now_ns: int) -> None:
        session = self._session
        request.num_looks += 1
        hashes = session.kv.usable_hashes(request)
        num_hit = session.kv.prefixes.reach(hashes)
        keys = session.kv.prefixes.absent(hashes, num_hit)
        if not keys:
            request.pages_short = 0
            return
        if (other := self._coming.get(keys[0])) is not None:
            if any(self._coming.get(key) is not other for key in keys):
                request.num_looks -= 1  # for the rest
            request.load = other
            self._requests[other].append(request)
            return
        sources, is_wanted = sources_of(session, request, self._connectors)
        if not sources or len(hashes) - num_hit < (1 if is_wanted else MIN_BLOCKS):
            request.pages_short = 0
            return
        for source in sources:
            ask(session, source, keys)
        load = Load(hashes, keys, sources, now_ns, is_wanted, session.pool.num_resets)
        if request.pages_short:
            self._reserve(load, hashes[:num_hit], request.pages_short)
        self._requests[load], request.load = [request], load
        self._sources.update({source.number: (load, source) for source in sources})
        self._coming.update(dict.fromkeys(keys, load))
        session.counts.add("external_prefix_cache_queries", amount=(len(hashes) - num_hit) * session.kv.block_size)

    # --- answers ---

    def found(self, sender: Identity, answer: PagesFound, now_ns: int) -> None:
        """A holder, or a worker for its connector, says what it has."""
        load, source = self._sources.get(answer.number, (None, None))
        if load is None or source is None:
            if answer.pages and sender.role is not Role.WORKER:  # nobody waits for it any more
                self._session.send(sender, EndLease(answer.number))
        elif sender in source.missing and answer.session in (0, self._session.number):
            take_answer(self._session, source, sender, answer, load.asked)
            self._choose(load, now_ns)

    def _choose(self, load: Load, now_ns: int) -> None:
        """Once all have answered: copies what is worth it."""
        if load.state is not LoadState.ASKED or any(source.missing for source in load.sources):
            return
        by_key: dict[bytes, Source] = {}
        for source in load.sources:
            for key in (source.has or ()) if not source.lost else ():
                by_key.setdefault(key, source)
        session = self._session
        prefixes, pool, size = session.kv.prefixes, session.pool, session.kv.block_size
        self._end_reserve(load)
        begin, end = prefixes.reach(load.hashes), prefixes.reach(load.hashes, by_key)
        needed = prefixes.needed(load.hashes[:end])
        load.chosen = {one: by_key[one.key] for one in needed if pool.find(one.key) is None}
        num_pages = Counter[str]()
        for one, source in load.chosen.items():
            num_pages[source.kind] += one.width
        if end - begin < (1 if load.is_wanted else MIN_BLOCKS):
            self._over(load, "nothing")
        elif not load.is_wanted and not self._rates.is_worth(
            num_pages, begin * size, end * size, session.batching.budget
        ):
            self._over(load, "slow")
        elif not self._makes_room(load, needed):
            self._over(load, "no_room", sum(key.width for key in needed))  # others may take what is cached now
        else:
            load.num_hit = begin
            self._move(load, now_ns)

    def _reserve(self, load: Load, cached: Sequence[bytes], count: int) -> None:
        """So many pages, and what is cached, are kept until the holders have answered: running requests would take them."""
        pool = self._session.pool
        keys = self._session.kv.prefixes.needed(cached)
        load.present = pool.lease(page for key in keys for page in pool.find(key.key) or ())
        load.reserved = pool.lease_new(max(0, min(count - len(load.present.pages), pool.num_free)))

    def _end_reserve(self, load: Load) -> None:
        if load.present is not None and load.reserved is not None:
            self._session.pool.end_lease(load.present)
            self._session.pool.end_lease(load.reserved)
            load.present = load.reserved = None

    def _makes_room(self, load: Load, needed: Sequence[Key]) -> bool:
        """Leases its pages; for the next to start, others that wait give theirs up."""
        first = self._session.batching.waiting[:1]
        is_first = bool(first) and first[0] in self._requests[load]
        while not self._lease(load, needed):
            if not (is_first and self._spare(first[0])):
                return False
        return True

    def _lease(self, load: Load, needed: Sequence[Key]) -> bool:
        """Pages to copy into; what is cached before and between them is kept. False: too few are free."""
        pool = self._session.pool
        count = sum(key.width for key in load.chosen)
        present = pool.lease(page for key in needed for page in pool.find(key.key) or ())
        if count > pool.num_free:
            pool.end_lease(present)
            return False
        load.present, load.lease = present, pool.lease_new(count)
        return True

    def _move(self, load: Load, now_ns: int) -> None:
        assert load.lease is not None
        deadline_ns = min(now_ns + MOVE_NS, load.since_ns + LEASE_NS)
        load.move(LoadState.MOVING)
        load.since_ns = now_ns
        for request in self._requests[load]:
            request.pages_short = 0
        pages = iter(load.lease.pages)
        here = {key: [next(pages) for _ in range(key.width)] for key in load.chosen}
        for source in load.sources:
            keys = [key for key, chosen in load.chosen.items() if chosen is source]
            if not keys:
                self._end_lease(source, is_asked=False)
                continue
            move = Move(source.kind, True, [page for key in keys for page in here[key]], deadline_ns=deadline_ns)
            if source.holder is not None:
                has = source.has or {}
                move.there, move.memory = [page for key in keys for page in has[key.key]], source.memory
            else:
                move.keys, move.params = [key.key for key in keys for _ in range(key.width)], source.params
            self._moves.begin(move)
            self._moving[move.number] = load, source, keys

    def moved(self, move: Move, now_ns: int) -> None:
        """All workers have made this copy; it may be a save."""
        load, source, keys = self._moving.pop(move.number, (None, None, ()))
        if load is None or source is None:
            return
        at = 0
        for key in keys:
            if not move.failed.isdisjoint(range(at, at + key.width)):
                load.failed[key] = move.message
            at += key.width
        self._rates.learn(move.kind, len(move.pages), move.duration_ns / 1e9)
        self._end_lease(source, is_asked=True)
        if not any(one is load for one, _, _ in self._moving.values()):
            load.move(LoadState.ENDING)
            load.since_ns = now_ns
            self._complete(load)

    def _end_lease(self, source: Source, *, is_asked: bool) -> None:
        """Nothing of it is read any more. is_asked: whether the lease had held counts."""
        if source.is_leased and source.holder is not None:
            source.is_leased, source.is_ending = False, is_asked
            self._session.send(source.holder, EndLease(source.number))
        if not source.is_ending:
            self._sources.pop(source.number, None)

    def lease_ended(self, sender: Identity, answer: LeaseEnded) -> None:
        """A holder says whether the lease had held."""
        load, source = self._sources.get(answer.number, (None, None))
        if load is not None and source is not None and source.is_ending and source.holder == sender:
            self._lose(source, "" if answer.valid else f"{sender} has not kept its pages")
            self._complete(load)

    def _lose(self, source: Source, why: str) -> None:
        """Nothing more comes from it. why: nothing counts that came; empty: all does."""
        source.missing.clear()
        source.is_leased = source.is_ending = False
        source.lost = source.lost or why
        self._sources.pop(source.number, None)

    def _complete(self, load: Load) -> None:
        """Once all leases have ended: what counts goes to the prefix cache."""
        if load.state is not LoadState.ENDING or any(source.is_ending for source in load.sources):
            return
        pool, counts = self._session.pool, self._session.counts
        lease, present = load.lease, load.present
        assert lease is not None
        assert present is not None
        load.failed = {key: source.lost for key, source in load.chosen.items() if source.lost} | load.failed
        pages, kept, num_loaded = iter(lease.pages), list(present.pages), 0
        for key in load.chosen:
            some = [next(pages) for _ in range(key.width)]
            if load.num_resets == pool.num_resets and key not in load.failed:
                num_loaded += 1
                if pool.find(key.key) is None:  # nobody has computed it meanwhile
                    pool.cache_block(key.key, some)
                    self._settled.loaded(key.key, some)
                    kept += some
        load.lease, load.present = pool.lease(kept), None
        pool.end_lease(lease)
        pool.end_lease(present)
        counts.add("kv_loaded_blocks", amount=num_loaded)
        num_blocks = max(0, self._session.kv.prefixes.reach(load.hashes) - load.num_hit)
        num_tokens = num_blocks * self._session.kv.block_size
        counts.add("external_prefix_cache_hits", amount=num_tokens)
        for request in self._requests[load][:1]:
            request.num_loaded = num_tokens
        if load.failed:
            counts.add("kv_load_failed_blocks", amount=len(load.failed))
            self._fail(load, f"{len(load.failed)} of {len(load.chosen)} blocks: {next(iter(load.failed.values()))}")
        counts.add("kv_loads", "failed" if load.failed else "loaded")
        load.move(LoadState.LOADED)
        if not self._requests[load]:
            self._release(load)
        self._let_go(load, self._requests[load][1:])

    def _fail(self, load: Load, why: str) -> None:
        self.failures += [(request, why) for request in self._requests[load]]

    # --- ends ---

    def _over(self, load: Load, outcome: str, pages_short: int = 0) -> None:
        """Nothing is copied. Who has not answered is told to end its lease when it does."""
        self._end_reserve(load)
        for request in self._requests[load]:
            request.pages_short = pages_short
        for source in load.sources:
            self._end_lease(source, is_asked=False)
        load.move(LoadState.OVER)
        self._let_go(load, self._requests[load])
        self._session.counts.add("kv_loads", outcome)

    def _release(self, load: Load) -> None:
        """What it keeps is merely cached from now on."""
        assert load.lease is not None
        load.move(LoadState.OVER)
        self._session.pool.end_lease(load.lease)
        load.lease = None

    def _let_go(self, load: Load, requests: Iterable[Request]) -> None:
        """These wait no longer."""
        for request in list(requests):
            self._requests[load].remove(request)
            request.load = None
        if not (load.waits and self._requests[load]):
            for key in load.asked:
                if self._coming.get(key) is load:
                    del self._coming[key]
        if load.state is LoadState.OVER:
            del self._requests[load]

    def remove(self, request: Request) -> None:
        """It ends, or starts and holds its blocks itself. A load that is moving goes on without it."""
        load = request.load
        if load is None:
            return
        if load.state is LoadState.LOADED:
            self._release(load)
        self._let_go(load, [request])
        if load.state is LoadState.ASKED and not self._requests[load]:
            self._over(load, "dropped")

    def _spare(self, wanting: Request) -> bool:
        """Memory is short: the last of those that wait merely hopes that its blocks stay cached."""
        for load, requests in reversed(self._requests.items()):
            if load.state is LoadState.LOADED and wanting not in requests:
                for request in requests:  # it is looked for again once there is room
                    request.pages_short = len(load.lease.pages) if load.lease is not None else 0
                self._release(load)
                self._let_go(load, requests)
                return True
        return False

    def lost(self, peer: Identity, now_ns: int) -> None:
        """A holder is lost: it has nothing, and nothing counts that it had."""
        for load in list(self._requests):
            mine = [source for source in load.sources if source.holder == peer] if load.waits else []
            for source in mine:
                self._lose(source, f"{peer} is lost")
            if mine and all(source.lost for source in load.chosen.values()):
                self._goes_on_alone(load, f"{peer} is lost")
            self._choose(load, now_ns)
            self._complete(load)

    def _goes_on_alone(self, load: Load, why: str) -> None:
        """Nobody waits any longer until its copies have ended."""
        if load.state is LoadState.MOVING and self._requests[load]:
            self._fail(load, f"{len(load.chosen)} of {len(load.chosen)} blocks: {why}")
            self._let_go(load, self._requests[load])

    def tick(self, now_ns: int) -> None:
        """Limits pass: those that have not answered have nothing."""
        for load in list(self._requests):
            waited_ns = now_ns - load.since_ns
            if load.state is LoadState.ASKED and waited_ns > ANSWER_NS:
                for source in [one for one in load.sources if one.missing]:
                    source.missing.clear()
                    source.has = None
                    self._sources.pop(source.number, None)
                self._choose(load, now_ns)
            elif load.state is LoadState.MOVING and waited_ns > MOVE_NS:
                self._goes_on_alone(load, f"the copy takes longer than {MOVE_NS // 10**9} s")
            elif load.state is LoadState.ENDING and waited_ns > ANSWER_NS:
                for source in [one for one in load.sources if one.is_ending]:
                    self._lose(source, f"{source.holder} has not said that it kept its pages")
                self._complete(load)

    def reset(self) -> None:
        """The prefix cache is reset: nothing counts that is under way. Requests look anew."""
        for load, requests in list(self._requests.items()):
            for request in requests:
                request.num_looks = 0
            if load.state is LoadState.ASKED:
                self._over(load, "reset")
                continue
            if load.state is LoadState.LOADED:
                self._release(load)
            self._let_go(load, requests)

    def end(self) -> None:
        """The session with the workers ends, and all pages with it."""
        for _, source in list(self._sources.values()):
            self._end_lease(source, is_asked=False)

    def leases(self) -> list[Lease]:
        """Those that its loads have in the pool."""
        held = ((load.lease, load.present, load.reserved) for load in self._requests)
        return [lease for some in held for lease in some if lease is not None]

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        for load, requests in self._requests.items():
            assert load.state is not LoadState.OVER, "a load that is over is kept"
            assert all(request.load is load for request in requests), "a request waits for another load"
            assert (load.lease is not None) == (load.state is not LoadState.ASKED)
            assert load.reserved is None or load.state is LoadState.ASKED
            is_copied = load.state in (LoadState.MOVING, LoadState.ENDING)
            assert (load.present is not None) == (is_copied or load.reserved is not None)
            assert load.state is not LoadState.LOADED or len(requests) == 1, "what is loaded is kept for nobody"
        for load in self._coming.values():
            assert load.waits and self._requests[load], "keys that nobody waits for are expected"  # noqa: PT018
