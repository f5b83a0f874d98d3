"""The life of a process: arguments, start-up, signals, heartbeat, orderly end.

Every role's main.py calls `main`. What the process does is its App; this module never looks inside messages other than
the supervisor's Shutdown.
"""

import argparse
import asyncio
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import setproctitle
import uvloop
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.log_levels import level_of
from meshlm.protocol.edges import control
from meshlm.protocol.timeline import RecordTimeline
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.errors import ContextTooLong, ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process import in_hand, logs, numa, streams
from meshlm.runtime.process.entry import give_back_memory
from meshlm.runtime.process.orphan import Orphan

BEAT_S = 0.5
HEAR_SETTINGS = (Role.FRONTEND, Role.COORDINATOR)  # which have limits of --max-waiting and the like
LAST_WORDS_S = 0.5  # how long a failing process waits for its words to be taken


class App(Protocol):
    """The interface that a role implements in its io.py. All methods run in the event loop. Those that return here may be left out."""

    async def start(self, mesh: Mesh) -> dict[str, str]:
        """Load what is needed; return facts for the user. ProcessFatal when it cannot be."""
        ...

    def on_message(self, peer: Identity, message: Struct) -> None: ...
    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        return

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None:
        """Called once after each batch of messages: send what piled up."""
        return

    def beat(self) -> tuple[int, str]:
        """Step count and phase, as the thread that works left them."""
        ...

    def num_requests(self) -> int:
        """How many requests it has: a death without any is none of theirs."""
        ...

    async def drain(self, limit_s: float) -> None:
        """Refuse new work and finish what runs, for `limit_s` at most."""
        return

    async def stop(self) -> None:
        return


def main(
    role: Role,
    make_app: Callable[[], App],
    argv: list[str] | None = None,
    load_ahead: Callable[[MeshConfig], None] = lambda config: None,
) -> NoReturn:
    """Run a process of the mesh to its end. Exit code 0 after an orderly stop, 1 after a failure.

    A standby does `load_ahead` (what start() will find done) and waits for its turn before it takes its place in the mesh. Which place
    that is it may learn only then."""
    streams.open_closed()
    parser = argparse.ArgumentParser(prog=f"meshlm {role.value}")
    parser.add_argument("--config-fd", type=int, required=True, help="descriptor with the mesh's configuration")
    parser.add_argument("--identity", type=Identity.parse, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--log-fd", type=int, help="descriptor for log lines; default: stderr")
    parser.add_argument("--standby", type=int, help="descriptor on which to wait for the turn")
    arguments = parser.parse_args(argv)
    config = _read(arguments.config_fd)
    identity, incarnation = arguments.identity, arguments.incarnation
    logs.configure(config.run, arguments.log_fd, identity)
    if arguments.standby is not None:
        setproctitle.setproctitle(f"meshlm: standby {role.value}")
        load_ahead(config)
        give_back_memory()
        identity, incarnation, config_fd = _wait_for_turn(arguments.standby)
        config = _read(config_fd)  # the mesh may have been scaled since, and its settings changed
        logs.set_level(level_of(config.run.log_level, identity))
    setproctitle.setproctitle(f"meshlm: {identity}")
    if role is Role.WORKER:
        numa.bind(config, identity)
    _dump_stacks_on_request(Path(config.run.run_dir), identity)
    if config.resolved is not None and config.resolved.general_plugins:
        _run_plugins(identity)
    process = _Process(config, identity, Incarnation(incarnation), make_app())
    code = uvloop.run(process.run())
    # An interpreter that ends waits for threads (for a long prompt that is being encoded, say), and in its end libraries' C++ code may
    # abort or report what it holds.
    streams.flush()
    os._exit(code)


def _run_plugins(identity: Identity) -> None:
    """Those of `meshlm.general`, before anything that they may change is there. The supervisor ran them too, so they rarely fail."""
    from meshlm.runtime import plugins  # few meshes have any

    try:
        plugins.run_general(os.environ)
    except plugins.PluginError as error:
        streams.complain(f"{identity}: {error}")
        streams.flush()
        os._exit(1)  # a plug-in that hangs has a thread


def _read(config_fd: int) -> MeshConfig:
    """The supervisor hands the configuration over in memory: a file could be removed, or be somebody else's."""
    with open(config_fd, "rb") as file:
        return msgspec.json.decode(file.read(), type=MeshConfig)


def _wait_for_turn(descriptor: int) -> tuple[Identity, int, int]:
    """Say that all is loaded; the place, incarnation and configuration to begin with. Ends the process when it is not needed."""
    try:
        with socket.socket(fileno=descriptor) as turn:
            turn.send(b"loaded\n")
            said, (config_fd, *_), _, _ = socket.recv_fds(turn, 64, 1)
            identity, incarnation = said.decode("ascii").split()
            return Identity.parse(identity), int(incarnation), config_fd
    except (OSError, ValueError):
        sys.exit(0)


def _dump_stacks_on_request(run_dir: Path, identity: Identity) -> None:
    """SIGUSR1 writes all threads' stacks to a file in the run directory."""
    path = run_dir / f"{identity.role.value}-{identity.index}.stacks.txt"
    faulthandler.register(signal.SIGUSR1, path.open("a"))  # the file stays open as long as the process
    faulthandler.enable()


async def _first(*futures: "asyncio.Future[Any]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


class _Process:
    """One run of one App."""

    def __init__(self, config: MeshConfig, identity: Identity, incarnation: Incarnation, app: App) -> None:
        self._box = logs.keep(Path(config.run.run_dir), identity, incarnation)
        self._config, self._identity, self._incarnation, self._app = config, identity, incarnation, app
        self._mesh = Mesh(identity, incarnation, config, self)
        self._mesh.say_beat = self._say_beat
        self._facts: dict[str, str] | None = None
        self._shutdown: asyncio.Event | None = None
        self._drain_s = config.run.drain_timeout
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)  # as long as the process
        self._orphan = Orphan(config, self._supervisor_lost, self._end)

    async def run(self) -> int:
        """Start, serve until told to stop, end."""
        loop = asyncio.get_running_loop()
        self._shutdown = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            self._mesh.on_fatal = loop.create_future()
            await self._mesh.open()
            self._beat()
            await self._start_and_serve()
        except ProcessFatal as error:
            logs.record(str(error), "error", process=str(self._identity))
            return await self._fail(str(error), error.fits if isinstance(error, ContextTooLong) else 0)
        except Exception as error:  # a bug of ours: the supervisor says it, and starts another
            self._mesh.log.exception("process failed")
            return await self._fail(f"{self._identity}: {type(error).__name__}: {error}")
        await self._mesh.close()
        return 0

    async def _start_and_serve(self) -> None:
        assert self._shutdown is not None
        assert self._mesh.on_fatal is not None
        starting = asyncio.ensure_future(self._app.start(self._mesh))
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        fatal = self._mesh.on_fatal
        await _first(starting, shutdown, fatal)
        if fatal.done():
            fatal.result()
        if starting.done():
            self._facts = starting.result()
            gc.collect()
            gc.freeze()  # what start-up made stays: later collections need not look at it
            give_back_memory()
            self._mesh.set_ready()
            logs.record("ready", process=str(self._identity), **self._facts)
            self._mesh.tell_supervisor(control.Ready(self._facts))
            await _first(shutdown, fatal)
            if fatal.done():
                fatal.result()
            await self._app.drain(self._drain_s)
        else:
            starting.cancel()
        await self._app.stop()

    async def _fail(self, message: str, fits: int = 0) -> int:
        """Say why, give the supervisor a moment to take it, end."""
        for _ in range(20):  # it may have failed before the link was open
            if self._mesh.peers(Role.SUPERVISOR):
                break
            await asyncio.sleep(LAST_WORDS_S / 10)
        else:
            streams.complain(f"{self._identity}: {message}")
        self._mesh.tell_supervisor(control.Failed(message, fits))
        await asyncio.sleep(LAST_WORDS_S)
        await self._mesh.close()
        streams.flush()
        os._exit(1)  # threads of a failed start must not hold the process

    def _on_signal(self) -> None:
        assert self._shutdown is not None
        if self._shutdown.is_set():
            os._exit(1)
        self._shutdown.set()

    def _end(self) -> None:
        assert self._shutdown is not None
        self._shutdown.set()

    def _supervisor_lost(self) -> None:
        """Look for the next one at once."""
        self._mesh.lost(self._mesh.supervisor)

    def _beat(self) -> None:
        self._say_beat()
        self._mesh.call_later(BEAT_S, self._beat)

    def _say_beat(self) -> None:
        step, phase = self._app.beat()
        in_hand.count(self._app.num_requests())
        rss = int(os.pread(self._statm, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self._mesh.tell_supervisor(control.Heartbeat(step, phase, rss, self._mesh.sent()))
        if self._box is not None:
            self._box.beat(time.time(), step, phase)

    # --- Listener: the App's events, less what concerns the process itself ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        if type(message) is control.Shutdown:
            assert self._shutdown is not None
            logs.record("asked to end", process=str(self._identity), drain_s=message.drain_s)
            self._drain_s = message.drain_s
            if message.handover:
                self._app.on_message(peer, message)
            self._shutdown.set()
        elif type(message) is control.Supervised:
            self._orphan.supervised(message)
        elif type(message) is RecordTimeline:
            self._mesh.timeline.begin(message.number)
            self._mesh.call_later(message.seconds, self._tell_timeline, message.number)
        elif type(message) is control.SetRanks:
            self._mesh.config = message.applied(self._mesh.config)
            self._app.on_message(peer, message)
        elif type(message) is control.ChangeSettings:
            self._mesh.config = message.applied(self._mesh.config)
            logs.set_level(level_of(self._mesh.config.run.log_level, self._identity))
            logs.record("settings changed", process=str(self._identity), settings=message.values)
            if self._identity.role in HEAR_SETTINGS:
                self._app.on_message(peer, message)
        else:
            self._app.on_message(peer, message)

    def _tell_timeline(self, number: int) -> None:
        if (part := self._mesh.timeline.end(number)) is not None:
            host = self._config.node.host if self._config.node is not None and self._config.node.index else ""
            self._mesh.tell_supervisor(msgspec.structs.replace(part, host=host))

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        logs.record("peer is there", "debug", process=str(self._identity), peer=str(peer))
        if peer == self._mesh.supervisor:
            if self._facts is not None:
                self._mesh.tell_supervisor(control.Ready(self._facts))
        else:
            self._app.on_peer_up(peer, incarnation)

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        logs.record("peer is gone", process=str(self._identity), peer=str(peer), reason=reason)
        if peer != self._mesh.supervisor:
            self._app.on_peer_down(peer, incarnation, reason)

    def flush(self) -> None:
        self._app.flush()
