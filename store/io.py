"""The store's links, its memory and its clock.

The memory is a file without a name (memfd): workers of this host map it by way of this process's descriptors, and keep what they have
mapped when this process dies. The kernel gives its pages as they are first written.
"""

import asyncio
import json
import os
import time

from msgspec import Struct

from meshlm.protocol.counts import Counted, ProcessCounts
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation
from meshlm.runtime.errors import LinkDown, ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.events import PeerLost, Received, Tick
from meshlm.runtime.process.process import App
from meshlm.runtime.process.readable import about
from meshlm.store.admission import MAX_TRACKED, Admission
from meshlm.store.core import Event, Store

GIB = 1 << 30
TICK_S = 1.0


class StoreApp(App):
    """The store as a process."""

    _mesh: Mesh  # from start() on

    def __init__(self) -> None:
        self._core: Store | None = None
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
        self._core = Store(num_bytes, path, admission)
        for peer, message in self._early:
            self.on_message(peer, message)
        self._tick()
        return {"memory": f"{config.kv_offloading_size:g} GiB"}

    def _tick(self) -> None:
        self._mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        assert self._core is not None
        self._ticks += 1
        self._do(Tick(time.time()))
        if (told := self._core.told()) != self._told:
            self._told = told
            self._send(COORDINATOR, Counted(told))

    def _do(self, event: Event) -> None:
        assert self._core is not None
        for effect in self._core.handle(event, asyncio.get_running_loop().time()):
            self._send(effect.to, effect.message)

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
        return 0
