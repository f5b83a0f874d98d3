"""The store's links, its memory and its clock.

The memory is a file without a name (memfd): workers of this host map it by way of this process's descriptors, and keep what they have
mapped when this process dies. The kernel gives its pages as they are first written.
"""

import asyncio
import contextlib
import json
import mmap
import os
import time
from pathlib import Path

from msgspec import Struct

from meshlm.protocol.config import KVTransferConfig
from meshlm.protocol.counts import Counted, ProcessCounts
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation
from meshlm.runtime.errors import LinkDown, ModelFilesError, ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.model_files.object_store import folder_of, is_url
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick
from meshlm.runtime.process.process import App
from meshlm.runtime.process.readable import about
from meshlm.store.admission import MAX_TRACKED, Admission
from meshlm.store.core import Event, Store
from meshlm.store.disk.events import FileWritten
from meshlm.store.disk.folder import Folder
from meshlm.store.disk.objects import Objects
from meshlm.store.disk.threads import DiskThreads

GIB = 1 << 30
TICK_S = 0.25
TELL_EVERY = 4  # ticks
FLUSH_S = 3.0  # that a mesh's end waits for files that are not written yet


class StoreApp(App):
    """The store as a process."""

    _mesh: Mesh  # from start() on

    def __init__(self) -> None:
        self._core: Store | None = None
        self._threads: DiskThreads | None = None
        self._said = ""  # why the second tier failed last
        self._flushed = asyncio.Event()  # all files are written
        self._flushed.set()
        self._told = ProcessCounts()  # to the coordinator
        self._early: list[tuple[Identity, Struct]] = []  # what peers said before start() ran
        self._ticks = 0

    async def start(self, mesh: Mesh) -> dict[str, str]:
        config = mesh.config.kv_transfer
        if config.kv_offloading_size is None:
            raise ProcessFatal("the configuration has no store (--kv-offloading-size)")
        self._mesh = mesh
        num_bytes = int(config.kv_offloading_size * GIB)
        self._memory = os.memfd_create("kv-store")  # as long as the process
        os.ftruncate(self._memory, num_bytes)
        options = json.loads(config.connector_options)
        path = f"/proc/{os.getpid()}/fd/{self._memory}"
        admission = Admission(options.get("store_threshold", 0), options.get("max_tracker_size", MAX_TRACKED))
        if config.kv_offloading_path:
            self._core = Store(num_bytes, path, admission, config.kv_offloading_disk_size)
            self._threads = DiskThreads(_files(config), mmap.mmap(self._memory, num_bytes), self._from_thread)
        else:
            self._core = Store(num_bytes, path, admission)
        for peer, message in self._early:
            self.on_message(peer, message)
        self._tick()
        below = {"then": config.kv_offloading_path} if config.kv_offloading_path else {}
        return {"memory": f"{config.kv_offloading_size:g} GiB", **below}

    def _tick(self) -> None:
        self._mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        assert self._core is not None
        self._ticks += 1
        self._do(Tick(time.time()))
        if self._ticks % TELL_EVERY == 0 and (told := self._core.told()) != self._told:
            self._told = told
            self._send(COORDINATOR, Counted(told))

    def _do(self, event: Event) -> None:
        assert self._core is not None
        for effect in self._core.handle(event, asyncio.get_running_loop().time()):
            if isinstance(effect, Send):
                self._send(effect.to, effect.message)
            elif self._threads is not None:
                self._threads.do(effect)
        if (disk := self._core.disk) is not None:
            self._say_failure(event, disk.failure)
            (self._flushed.set if disk.is_flushed else self._flushed.clear)()

    def _from_thread(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._mesh.call_soon_threadsafe(self._do, event)

    def _say_failure(self, event: Event, failure: str) -> None:
        """One line where the second tier begins to fail, or fails otherwise, and one when it works again."""
        path = self._mesh.config.kv_transfer.kv_offloading_path
        if failure and failure != self._said:
            self._mesh.log.warning("the second tier pauses", path=path, reason=failure)
            self._said = failure
        elif self._said and isinstance(event, FileWritten) and not event.failure:
            self._mesh.log.warning("the second tier works again", path=path)
            self._said = ""

    def _send(self, to: Identity, message: Struct) -> None:
        try:
            self._mesh.send(to, message)
        except LinkDown:  # its PeerLost follows, or the coordinator is told again when it is there
            self._mesh.log.debug("not delivered", to=str(to), **about(message))

    def on_message(self, peer: Identity, message: Struct) -> None:
        if self._core is None:
            self._early.append((peer, message))
            return
        begin_ns = time.monotonic_ns()
        self._do(Received(peer, self._mesh.incarnation_of(peer), message))
        if self._mesh.timeline.on:
            self._mesh.timeline.note(type(message).__name__, "loop", begin_ns)

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer == COORDINATOR:
            self._told = ProcessCounts()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self._early = [(sender, message) for sender, message in self._early if sender != peer]
        if self._core is not None:
            self._do(PeerLost(peer, incarnation))

    def beat(self) -> tuple[int, str]:
        if self._core is None:
            return 0, "starting"
        return self._ticks, f"{len(self._core.memory.keys)} keys"

    def num_requests(self) -> int:
        """Leases: a store that dies while pages are read or written does not count towards --max-restarts, as no rank needs it."""
        return sum(len(client.leases) for client in self._core.clients.values()) if self._core is not None else 0

    async def drain(self, limit_s: float) -> None:
        """Writes the files that are not written yet."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._flushed.wait(), max(limit_s, FLUSH_S))

    async def stop(self) -> None:
        if self._threads is not None:
            self._threads.close()


def _files(config: KVTransferConfig) -> Folder | Objects:
    """The second tier's files, in a folder or at a URL. ProcessFatal where that has no package."""
    if not is_url(config.kv_offloading_path):
        return Folder(Path(config.kv_offloading_path).expanduser().absolute())
    try:
        return Objects(folder_of(config.kv_offloading_path))
    except ModelFilesError as error:
        raise ProcessFatal(f"--kv-offloading-path {error}") from None
