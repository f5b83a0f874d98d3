"""Prompts whose KV is left to another mesh: their tickets, and the leases behind them.

Pure; owned by transfers.py, for one session with the workers. A request that leaves its KV is named when it begins, so that its end can
say where the pages are; when it ends they are leased, and its workers are told of the ticket. The lease ends once all workers have said
that the pages were taken, or at its deadline, a second behind that of the workers. A ticket that stands for nothing is no error: the
other mesh computes the prompt.
"""

import json
from dataclasses import dataclass
from hashlib import sha256

from meshlm.protocol.config.kv_transfer import KVTransferConfig, PageTransfer
from meshlm.protocol.edges.kv import LeavePages, PagesTaken
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Identity
from meshlm.scheduler_proc.connectors.session import PageSession
from meshlm.scheduler_proc.kv.lease import Lease
from meshlm.scheduler_proc.request import Request

AFTER_NS = 1_000_000_000  # from the workers' deadline to the end of the lease


@dataclass(slots=True, eq=False)
class Left:
    """A ticket's lease. missing: workers from which its pages were not taken yet."""

    lease: Lease
    until_ns: int
    missing: set[Identity]


class LeftPrompts:
    """The tickets of one session. secret: bytes that nobody else knows."""

    def __init__(self, session: PageSession, config: KVTransferConfig, secret: bytes) -> None:
        assert config.transfer is not None
        self._session, self._config, self._secret = session, config, secret
        self._transfer: PageTransfer = config.transfer
        self._left: dict[int, Left] = {}

    def begin(self, request: Request) -> None:
        """A request gets a row. One that leaves its KV to whoever has its answer's kv_transfer_params gets these."""
        if self._transfer.by_request_id or not self._session.page_servers or _leaving(request) is None:
            return
        (host, port), *_ = self._session.page_servers
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._config.engine_id or self._session.namespace.hex(),
            "remote_block_ids": list(range(len(self._session.kv.usable_hashes(request)))),
            "remote_host": host,
            "remote_port": port,
            "remote_ports": [port for _, port in self._session.page_servers],
            "tp_size": len(self._session.workers),
            "ticket": self._ticket(request).hex(),
        }
        request.kv_transfer = json.dumps(params).encode()

    def _ticket(self, request: Request) -> bytes:
        """bytes[TICKET_BYTES]: its own, or one that nobody can guess."""
        extra = _leaving(request)
        named = (
            json.loads(extra.kv_params).get("ticket") if extra is not None and self._transfer.by_request_id else None
        )
        return bytes.fromhex(named) if named else sha256(self._secret + request.work.request_id.encode()).digest()

    def leave(self, request: Request, now_ns: int) -> None:
        """It ends, and its blocks are still there."""
        extra, session = _leaving(request), self._session
        if extra is None or not session.page_servers:
            return
        prefixes, pool = session.kv.prefixes, session.pool
        hashes = session.kv.usable_hashes(request)[: request.num_prompt // session.kv.block_size]
        needed = prefixes.needed(hashes[: prefixes.reach(hashes)])
        if not needed:
            return
        found = [(key.key, page) for key in needed for page in pool.find(key.key) or ()]
        number, deadline_ns = next(session.numbers), now_ns + int(self._transfer.lease_s * 1e9)
        lease = pool.lease(dict.fromkeys(page for _, page in found))
        self._left[number] = Left(lease, deadline_ns + AFTER_NS, set(session.workers))
        keys, pages = b"".join(key for key, _ in found), pack_i32(page for _, page in found)
        left = LeavePages(session.number, number, self._ticket(request), keys, pages, deadline_ns, extra.kv_params)
        for worker in session.workers:
            session.send(worker, left)

    def taken(self, sender: Identity, taken: PagesTaken) -> None:
        """Nobody reads any more from this worker."""
        left = self._left.get(taken.number)
        if left is None or taken.session != self._session.number:
            return
        left.missing.discard(sender)
        if not left.missing:
            self._end(taken.number)

    def tick(self, now_ns: int) -> None:
        """Leases end by themselves."""
        for number in [number for number, left in self._left.items() if left.until_ns <= now_ns]:
            self._end(number)

    def _end(self, number: int) -> None:
        self._session.pool.end_lease(self._left.pop(number).lease)

    def leases(self) -> list[Lease]:
        """Those that it has in the pool."""
        return [left.lease for left in self._left.values()]


def _leaving(request: Request) -> ExtraKind | None:
    """The extra of a request by which it leaves its KV."""
    return next((extra for extra in request.work.extras if extra.leaves_kv), None)
