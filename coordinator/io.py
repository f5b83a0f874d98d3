"""The coordinator's links and timers."""

import asyncio
import sys
import time
from pathlib import Path

from msgspec import Struct

from meshlm.coordinator.core import Coordinator, Event
from meshlm.coordinator.joint import JointGroup
from meshlm.protocol.edges.admit import Admit, Assign
from meshlm.protocol.weights import Manifest
from meshlm.protocol.wire.ids import Identity, Incarnation
from meshlm.runtime.errors import LinkDown, MessageTooLong
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.model_files import manifest, received
from meshlm.runtime.process import in_hand
from meshlm.runtime.process.events import PeerLost, Received, Tick
from meshlm.runtime.process.process import App
from meshlm.runtime.process.readable import about

STATS_EVERY_S = 1.0


class CoordinatorApp(App):
    """The coordinator as a process: frontends end first and wait for their requests, so it has nothing left to drain."""

    _mesh: Mesh  # from start() on, as the core
    _manifest: Manifest  # as the file of the run directory has it

    def __init__(self) -> None:
        self._core: Coordinator | None = None
        self._ticks = 0

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh, config, run_dir = mesh, mesh.config, Path(mesh.config.run.run_dir)
        self._manifest = manifest.read(run_dir) or Manifest(config.require_resolved().weights)
        self._core = Coordinator(
            config.scheduler.max_waiting,
            config.parallel.data_parallel_size,
            config.parallel.dp_routing,
            config.cache.enable_prefix_caching,
            config.parallel.data_parallel_rank or 0,
            config.resolved.max_num_seqs if config.resolved else sys.maxsize,
            JointGroup(config.parallel.data_parallel_size, int(time.time() * 1e3)) if config.lockstep else None,
            config.worker.enable_sleep_mode,
            config.kv_transfer.num_prefill_ranks,
            self._manifest,
            config.adapters.num_kept,
            str(received.folder_of(run_dir)) if config.worker.receives_weights else "",
        )
        self._core.patience.limit_s = config.worker.trainer_timeout
        self._core.patience.all_pauses = bool(config.worker.weight_transfer)
        self._tick()
        return {}

    def _tick(self) -> None:
        self._mesh.call_later(STATS_EVERY_S, self._tick)  # first: one that fails is not the last
        self._ticks += 1
        self._do(Tick(time.time()))

    def _do(self, event: Event) -> None:
        assert self._core is not None
        before = len(self._core.patience.given_up)
        effects = self._core.handle(event, asyncio.get_running_loop().time())
        for text in self._core.patience.given_up[before:]:
            self._mesh.log.warning("the mesh goes on with the weights that it has", reason=text)
        if self._core.weights.manifest != self._manifest:  # before any rank is told: whoever dies comes back with it
            self._manifest = self._core.weights.manifest
            manifest.write(Path(self._mesh.config.run.run_dir), self._manifest)
        for effect in effects:
            self._send(effect.to, effect.message)

    def _send(self, to: Identity, message: Struct) -> None:
        try:
            self._mesh.send(to, message)
        except LinkDown:
            # Its PeerLost follows, or it is not connected yet and gets the list when it is.
            self._mesh.log.debug("not delivered", to=str(to), **about(message))
        except MessageTooLong as error:
            if isinstance(message, Assign) and self._core is not None:
                self._send(message.detokenizer, self._core.too_long(message, str(error)))

    def on_message(self, peer: Identity, message: Struct) -> None:
        if self._core is not None:
            begin_ns = time.monotonic_ns()
            name = message.work.request_id if isinstance(message, Admit) else ""
            in_hand.holding(name, self._do, Received(peer, self._mesh.incarnation_of(peer), message))
            if self._mesh.timeline.on:
                self._mesh.timeline.note(type(message).__name__, "loop", begin_ns)

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if self._core is not None:
            self._do(PeerLost(peer, incarnation))

    def beat(self) -> tuple[int, str]:
        return self._ticks, "routing"

    def num_requests(self) -> int:
        return len(self._core.owner) + len(self._core.held) if self._core is not None else 0
