"""All of a worker that moves KV pages: the mover, the connectors, and what the bytes mean. The stepper thread makes it once there is an
engine, and only where the settings have pages move (KVTransferConfig.moves).

A load comes by way of the stepper, behind the steps before it; a save and a FindPages from the event loop. Both are answered from other
threads.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, structs

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.kv import NAMESPACE_BYTES, FindPages, LeavePages, MovePages, PagesFound, PagesMoved
from meshlm.protocol.edges.step import WorkerReady
from meshlm.protocol.operations import OperationId
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine import EngineFacts
from meshlm.workers.kv.connector_thread import ConnectorCalls, ConnectorFailed, ConnectorThread, MakeConnector, maker_of
from meshlm.workers.kv.connectors import Connector, Page
from meshlm.workers.kv.mover import Copied, Copy, Mover
from meshlm.workers.kv.pages import KVPages
from meshlm.workers.kv.remote.connector import RemoteConnector
from meshlm.workers.kv.remote.exchange import PageExchange
from meshlm.workers.kv.remote.slices import PageShape

LAYOUT = 1  # what a page's bytes are, of equal settings: whoever changes layout.py or the attention's order of numbers adds one


class PageMoves:
    """`say` sends an answer to the scheduler, `fatal` ends the process; both from any thread."""

    def __init__(
        self,
        config: MeshConfig,
        worker: int,
        facts: EngineFacts,
        pages: KVPages,
        tell: tuple[Callable[[Struct], None], Callable[[str], None]],
    ) -> None:
        """worker: its number in the mesh. tell: `say` and `fatal`. ProcessFatal."""
        self._say, fatal = tell
        self._place = worker % config.parallel.workers_per_rank
        self._pages = pages
        kv = config.kv_transfer
        self._namespace = namespace_of(config, facts, kv.fingerprint)
        shard = Shard.of_worker(config.parallel, worker)
        self._shape = PageShape(pages.page_bytes, *facts.kv_heads, shard)
        is_cut = self._shape.num_heads > 0  # other meshes may have another -tp
        self._place_between = shard.pp_rank if is_cut else self._place
        self._between = namespace_of(config, facts, kv.content_fingerprint, is_cut=is_cut)
        self._of_start = self._namespace, self._between
        self._mover = Mover(pages, fatal)
        options = json.loads(config.kv_transfer.connector_options)
        self._connectors = {
            name: self._connector(name, maker_of(name), options) for name in config.kv_transfer.connectors
        }
        self._exchange: PageExchange | None = None
        if (transfer := config.kv_transfer.transfer) is not None:
            exchange = self._exchange = PageExchange(transfer, worker, self._shape, self._read, self._say)
            exchange.rename(_slice(self._between, self._place_between))
            make = lambda *_: exchange.connector()  # noqa: E731
            connector = self._connector(transfer.connector, make, options, RemoteConnector.end)
            self._connectors[transfer.connector] = connector

    def _connector(
        self,
        name: str,
        make: MakeConnector,
        options: dict[str, object],
        end: Callable[[Any, Mapping[str, Any]], None] | None = None,
    ) -> ConnectorThread:
        def made() -> Connector:
            return make(_slice(self._namespace, self._place), self._pages.page_bytes, options)

        try:
            calls = ConnectorCalls(name, made)
        except ConnectorFailed as error:
            raise ProcessFatal(f"--kv-transfer-config: {error}") from None
        return ConnectorThread(calls, self._mover, self._pages.page_bytes, self._say, end)

    def described(self, ready: WorkerReady) -> WorkerReady:
        """The same with what its scheduler has to know of its pages."""
        pages = self._pages
        address = None if self._exchange is None else self._exchange.address
        told = {"page_bytes": pages.page_bytes, "namespace": self._namespace, "pages": pages.memory}
        return structs.replace(ready, **told, page_server=address)

    def begin(self, session: int) -> None:
        """What is of another session stops; called in the event loop, as soon as a Reset comes."""
        self._mover.session = session
        if self._exchange is not None:
            self._exchange.reset()

    def wait(self) -> None:
        """Until it has stopped; called by the stepper, before the Reset is answered."""
        self._mover.wait()

    def close(self) -> None:
        self._mover.close()
        for connector in self._connectors.values():
            connector.close()
        if self._exchange is not None:
            self._exchange.close()

    def leave(self, left: LeavePages) -> None:
        """Called in the event loop. What is left of an earlier session is nobody's."""
        if self._exchange is not None and left.session == self._mover.session:
            self._exchange.leave(left)

    def _read(self, session: int, pages: Sequence[int], deadline_ns: int) -> Sequence[Page]:
        """As ReadPages, from any thread but the mover's. Their steps were done before they were leased."""
        buffers, done = np.empty((len(pages), self._pages.page_bytes), np.uint8), Future[Copied]()
        self._mover.submit(
            Copy(session, False, pages, range(len(pages)), [buffers], None, deadline_ns, done.set_result)
        )
        return list(buffers[: done.result().num_pages])

    def find(self, find: FindPages) -> None:
        """Called in the event loop."""
        if (connector := self._connectors.get(find.connector)) is None:
            self._say(PagesFound(find.number, b"", session=find.session))
        else:
            connector.submit(find)

    def move(self, move: MovePages, *, is_behind_steps: bool = True) -> None:
        """Called by the stepper, behind the steps that were planned before it: they may write the pages that a load is to fill. What
        is saved was computed by steps whose results are back, and nobody writes it: it waits for no step."""
        after = self._pages.mark() if is_behind_steps else None
        if move.memory is not None:
            other, pages, lines = move.memory, ints(move.pages), ints(move.there)
            done = _Answer(move, self._pages.page_bytes, self._say)
            self._mover.submit(Copy(move.session, move.is_load, pages, lines, other, after, move.deadline_ns, done))
        elif (connector := self._connectors.get(move.connector)) is not None:
            connector.submit(move, after)
        else:
            message = f"there is no connector {move.connector!r}" if move.connector else "neither memory nor connector"
            _Answer(move, self._pages.page_bytes, self._say)(Copied(0, 0, message))

    def use_weights(self, version: WeightsVersion) -> None:
        """Pages are computed with these from now on. Called by the stepper, before the Reset is answered."""
        self._namespace, self._between = (digest(one + version.key) if version.key else one for one in self._of_start)
        self._renamed()

    def forget_weights(self, operation_id: OperationId) -> None:
        """The weights may be others since this operation: equal keys have other bytes. Its scheduler reckons the same."""
        self._namespace, self._between = (
            digest(one + operation_id.encode()) for one in (self._namespace, self._between)
        )
        self._renamed()

    def _renamed(self) -> None:
        for connector in self._connectors.values():
            connector.remake()
        if self._exchange is not None:
            self._exchange.rename(_slice(self._between, self._place_between))


class _Answer:
    """Tells the scheduler what became of a MovePages."""

    def __init__(self, move: MovePages, page_bytes: int, say: Callable[[Struct], None]) -> None:
        self._move, self._page_bytes, self._say = move, page_bytes, say

    def __call__(self, copied: Copied) -> None:
        move, count = self._move, copied.num_pages
        failed = pack_i32(range(count, len(move.pages) // 4))
        num_bytes = count * self._page_bytes
        self._say(PagesMoved(move.session, move.number, failed, num_bytes, copied.duration_ns, copied.message))


def digest(data: bytes) -> bytes:
    """bytes [NAMESPACE_BYTES]."""
    return hashlib.sha256(data).digest()[:NAMESPACE_BYTES]


def _slice(namespace: bytes, place: int) -> bytes:
    """The namespace of one worker's slices of pages: those of others of its rank have other bytes."""
    return digest(namespace + place.to_bytes(4, "little"))


def namespace_of(config: MeshConfig, facts: EngineFacts, fingerprint: str, *, is_cut: bool = False) -> bytes:
    """What the bytes of a page mean, equal for all workers of a rank and for all ranks of the model with these settings. is_cut:
    whoever reads them says which heads, so that -tp does not matter."""
    parallel, cache = config.parallel, config.cache
    said = (
        LAYOUT,
        fingerprint,
        (cache.kv_cache_dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype),
        (facts.block_size, facts.kv_specs),
        (0 if is_cut else parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
    )
    return digest(msgspec.json.encode(said))
