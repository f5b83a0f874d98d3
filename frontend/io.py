"""The frontend's links, server and clock. What its routes use are its rooms: open requests, readiness, what is observed, operations."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterable
from functools import partial

from msgspec import Struct

from meshlm import __version__
from meshlm.frontend import plugins
from meshlm.frontend.dashboard.feed import Feed
from meshlm.frontend.dashboard.snapshot import Facts
from meshlm.frontend.endpoints import PluginRoute
from meshlm.frontend.listener import HttpListener, Listener
from meshlm.frontend.observe.observer import Observer
from meshlm.frontend.operator.mesh_operations import MeshOperations
from meshlm.frontend.requests import submits
from meshlm.frontend.requests.adapters import Adapters
from meshlm.frontend.requests.admission import STOPPING, Admission, PoisonBodies, Readiness
from meshlm.frontend.requests.budget import Budget
from meshlm.frontend.requests.resolving import Resolving
from meshlm.protocol.adapters import AdapterList
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges import control
from meshlm.protocol.edges.media import MediaRead
from meshlm.protocol.edges.text import TextDeltas
from meshlm.protocol.operations import OperationDone
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation, Role
from meshlm.runtime import io_processors
from meshlm.runtime.client.media_client import MediaClient
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.deaths import allowed
from meshlm.runtime.process.figures import Figures

TICK_S = 1.0


class FrontendApp:
    """The process (`meshlm.runtime.process.process.App`), and the routes' Backend (requests/generation.py)."""

    version = __version__
    config: MeshConfig
    resolved: Resolved

    def __init__(self) -> None:
        self.client, self.figures = MeshClient(), Figures()
        self.requests = Admission(self.client, self._tell_open)
        self.readiness = Readiness(self.client, self.requests, self.figures)
        self.observer = Observer(self.client)
        self.operations = MeshOperations(self.client, self.figures)
        self.adapters, self.resolving = Adapters(), Resolving(())
        self.media = MediaClient()
        self.poison = PoisonBodies()
        self.io_processor: io_processors.IOProcessor | None = None
        self.endpoints: tuple[PluginRoute, ...] = ()
        self.draws = random.Random()
        self._listener: Listener | None = None
        self._is_stopping = False
        self._handing_over = False
        self._ticks = 0

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._use(mesh)
        server = mesh.config.server
        self.draws = submits.draws_of(mesh.config.model.seed, mesh.identity.index)
        self.io_processor = plugins.load(mesh.config, mesh.identity.index, self.observer.stat_loggers, os.environ)
        self.endpoints = plugins.load_endpoints(mesh.config, os.environ)
        self.resolving = plugins.resolving(mesh.config, os.environ)
        self.requests.budget = Budget(server.max_concurrent_bytes)
        facts = Facts(str(mesh.identity), self.version, self.resolved.served_names[0])
        self.observer.start(mesh, self.resolved, self.version, Feed(self, facts, server.max_dashboards))
        self._listener = self._make_listener()
        try:
            await self._listener.start()
        except OSError as error:
            raise ProcessFatal(f"--host {server.address} --port {server.port}: {error.strerror}") from None
        assert self._listener.serving is not None
        self._listener.serving.add_done_callback(self._served)
        self._tick()
        return {"listening on": f"{server.address}:{server.port}"}

    def _use(self, mesh: Mesh) -> None:
        """From now on there are links, and a configuration."""
        if mesh.config.resolved is None:
            raise ProcessFatal("the configuration is not resolved")
        self.client.mesh, self.config, self.resolved = mesh, mesh.config, mesh.config.resolved
        self.media.send = mesh.send
        self.client.questions.asker = mesh.identity
        self.client.set_max_deaths(allowed(mesh.config.run.max_restarts))
        self.client.tracker.placement.num_detokenizers = mesh.config.server.detokenizers
        self.adapters.begin(self.resolved)
        self.readiness.config, self.readiness.resolved = mesh.config, self.resolved

    def _make_listener(self) -> Listener:
        if not self.config.server.grpc:
            return HttpListener(self)
        from meshlm.frontend.grpc.listener import GrpcListener  # an extra, and 40 ms

        return GrpcListener(self)

    def _served(self, serving: "asyncio.Task[None]") -> None:
        """Ends the process when its server ends: it would be alive and do nothing."""
        error = None if serving.cancelled() else serving.exception()
        if self.client.mesh is not None and (error is not None or not self._is_stopping):
            self.client.mesh.fatal(f"the server ended: {error or 'nobody asked it to'}")

    def _tick(self) -> None:
        assert self.client.mesh is not None
        self.client.mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        self._ticks += 1
        self.observer.flush()
        self.client.tick()

    # --- Backend, and the dashboard's Source ---

    @property
    def num_open(self) -> int:
        return self.requests.num_open

    def open_choices(self) -> Iterable[Choice]:
        return self.requests.open_choices()

    def tell_supervisor(self, message: Struct) -> None:
        self.operations.tell_supervisor(message)

    def _tell_open(self) -> None:
        if self.readiness.is_refusing and self.client.mesh is not None:
            self.client.mesh.tell_supervisor(control.OpenRequests(self.num_open))

    # --- App ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case TextDeltas():
                begin_ns = time.monotonic_ns()
                self.client.on_message(peer, message, begin_ns / 1e9)
                if message.first or message.finished:
                    self.requests.note_moved()
                self.observer.written(message, begin_ns)
            case MediaRead():
                self.media.answered(message)
            case AdapterList():
                self.adapters.heard(message)
            case OperationDone():
                self.operations.asked.answered(message)
            case control.RanksScaled():
                self.operations.ranks.answered(message)
            case control.Refuse():
                self.readiness.is_refusing = message.on
                self.readiness.changed()
                self._tell_open()
            case control.ChangeSettings() | control.SetRanks() if self.client.mesh is not None:
                self.config = self.readiness.config = self.client.mesh.config
                self.requests.budget.max_bytes = self.config.server.max_concurrent_bytes
            case control.QueueFull():
                self.readiness.queue_full = message.on
            case control.MeshProcesses() | control.AskRequests() | control.FrontendRequests() if (
                self.client.mesh is not None
            ):
                self.observer.feed.told(message)
            case control.Shutdown(handover=True):
                self._handing_over = True
            case control.Died():
                self.poison.learn(message)
            case control.MeshStats():
                self.observer.mesh_stats(message)
                self.figures.take(message)
                self.readiness.changed()
            case _:
                self.client.on_message(peer, message, time.monotonic())

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer.role is Role.DETOKENIZER:
            self.client.detokenizer_up(peer)
            self.readiness.changed()
        elif peer.role is Role.MEDIA:
            self.media.up()
        elif peer.role is Role.COORDINATOR and self.client.mesh is not None:
            self.adapters.coordinator_up(partial(self.client.mesh.send, COORDINATOR))
            self.operations.asked.coordinator_up()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.DETOKENIZER:
            self.client.detokenizer_down(peer, incarnation)
        elif peer.role is Role.MEDIA:
            self.media.down()
        elif peer.role is Role.COORDINATOR:
            self.readiness.queue_full = False
            self.operations.asked.coordinator_lost()

    def flush(self) -> None:
        """Chunks are written as their rows are read."""

    def beat(self) -> tuple[int, str]:
        return self._ticks, f"{self.num_open} requests"

    def num_requests(self) -> int:
        return self.num_open

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, or leave them to other frontends; wait for the open ones."""
        self.observer.feed.close()
        if self._handing_over and self._listener is not None:
            await self._listener.hand_over(limit_s)
            return
        self.readiness.is_draining = True
        self.readiness.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.requests.all_closed()

    async def stop(self) -> None:
        """Open requests still get the reason; after a hand-over their connections break, since others serve who asks again."""
        if not self._handing_over:
            self.client.stop(STOPPING)
        if self._listener is not None:
            self._is_stopping = True
            await self._listener.stop()
        self.observer.close()
