"""Child processes: spawn, notice their end, signal. Called by incarnations.py and launch.py.

Children are separate programs, never forks of this one, in sessions of their own (a Ctrl-C in the terminal is for the
supervisor alone), and ask the kernel to kill them when the supervisor dies (runtime/process/entry.py). The configuration is handed
to each in memory, so that none depends on a file that could be removed or be somebody else's.

Folders in which workers keep compiled kernels: where the usual ones cannot be written there is a private one, so that none is left out.
Kernels are programs, so that folder is as private as the run directories beside it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime import platforms
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes import proc_stat, rundir
from meshlm.supervisor.processes.child_text import ChildText
from meshlm.supervisor.settings.vllm_env import ADMIN_API_KEYS, API_KEYS

FOLDER = {
    Role.FRONTEND: "frontend",
    Role.DETOKENIZER: "detokenizer",
    Role.COORDINATOR: "coordinator",
    Role.SCHEDULER: "scheduler_proc",
    Role.WORKER: "workers",
    Role.STORE: "store",
    Role.MEDIA: "mediaproc",
}
Variables = Mapping[str, str]
Loop = asyncio.AbstractEventLoop


def command(identity: Identity, incarnation: Incarnation, descriptors: Mapping[str, int]) -> list[str]:
    """The command line of a process of the mesh. `descriptors`: its flags for those that it inherits."""
    inherited = (word for flag, descriptor in descriptors.items() for word in (flag, str(descriptor)))
    return [
        *(sys.executable, "-P", "-m", "meshlm.runtime.process.entry", FOLDER[identity.role], str(os.getpid())),
        *("--identity", str(identity), "--incarnation", str(incarnation), *inherited),
    ]


def config_file(config: MeshConfig, role: Role) -> int:
    """A descriptor of a file in memory, which the caller closes. The keys of the API are the frontends' alone."""
    if role is not Role.FRONTEND:
        config = replace(config, server=replace(config.server, api_key=(), admin_api_key=()))
    descriptor = os.memfd_create("mesh.json")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(config))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


# Of libgomp's threads while they wait for each other, instead of 300,000: for that long they keep the cores from other processes, and
# from the very thread that they wait for (docs/performance.md, "On a CPU").
SPINS = "1000"
# Of glibc's malloc, where weights and KV caches of a CPU worker lie: pages of 2 MiB, which are read a fifth faster than those of 4 KiB,
# for what is smaller than such a page too (docs/performance.md, "On a CPU"). What is larger than 32 MiB is given back when it is freed.
LARGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432"
# a x b + c is rounded once in Triton's kernels, as their tolerances assume: 3.9 does so unless told otherwise, and warns; later ones
# will not.
FUSED = ("TRITON_DEFAULT_FP_FUSION", "1")


def variables_of(role: Role, config: MeshConfig, ours: Variables, of_workers: Variables) -> dict[str, str]:
    """The variables of a process, from those of this one. Secrets, which frontends have in their configuration, are left out."""
    environment = {name: value for name, value in ours.items() if name not in (*API_KEYS, *ADMIN_API_KEYS)}
    environment["PYTHONSAFEPATH"] = "1"
    if role is Role.WORKER:
        environment = {**platforms.with_devices(config.worker.device_ids, environment), **of_workers}
        environment.setdefault(*FUSED)
        if "OMP_WAIT_POLICY" not in environment:
            environment.setdefault("GOMP_SPINCOUNT", SPINS)
        if config.resolved is not None and config.resolved.device == "cpu":
            environment.setdefault("GLIBC_TUNABLES", LARGE_PAGES)
    return environment


class Child:
    """One incarnation of one process. A `standby` loads, says so, and begins when it is given its turn. The socket for that stays open
    as long as it lives: it may have its turn before it has said anything."""

    def __init__(
        self,
        identity: Identity,
        incarnation: Incarnation,
        config: MeshConfig,
        of_workers: Variables | None = None,
        *,
        standby: bool = False,
    ) -> None:
        """`of_workers`: variables for those. OSError when there can be no more processes."""
        self.identity = identity
        self.incarnation = incarnation
        self.loaded = False  # of a standby: it waits for its turn
        self.started_s = time.time()
        self._turn: socket.socket | None = None
        self._text: ChildText | None = None
        environment = variables_of(identity.role, config, os.environ, of_workers or {})
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_error:
            theirs.callback(os.close, config_fd := config_file(config, identity.role))
            descriptors = {"--config-fd": config_fd}
            if standby:
                self._turn, turn = socket.socketpair()
                on_error.callback(self._turn.close)
                descriptors["--standby"] = theirs.enter_context(turn).fileno()
            text: int | None = None
            if config.run.log_format == "json":
                ours, text = os.pipe()
                theirs.callback(os.close, text)
                self._text = ChildText(ours, lambda: str(self.identity))
                on_error.callback(self._text.close)
                theirs.callback(os.close, log_fd := os.dup(2))
                descriptors["--log-fd"] = log_fd
            self._process = subprocess.Popen(
                command(identity, incarnation, descriptors),
                pass_fds=tuple(descriptors.values()),
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=text,
                start_new_session=True,
                env=environment,
            )
            self.pid = self._process.pid
            on_error.callback(self._end)
            self._pidfd = os.pidfd_open(self.pid)
            on_error.pop_all()

    def _end(self) -> None:
        """Ends a child for which no descriptor is left: nobody would see its end."""
        self._process.kill()
        self._process.wait()

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[["Child", int], None]) -> None:
        """Call on_exit(self, code) once, when the process is gone and reaped; code < 0 is a signal."""

        def gone() -> None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            if self._turn is not None:
                loop.remove_reader(self._turn)
                self._turn.close()
            if self._text is not None:
                self._text.read(loop)
                self._text.end(loop)
            on_exit(self, self._process.wait())

        loop.add_reader(self._pidfd, gone)
        if self._text is not None:
            self._text.watch(loop)

    def when_loaded(self, loop: asyncio.AbstractEventLoop, on_loaded: Callable[["Child"], None]) -> None:
        """Has a standby call on_loaded(self) once. When it ends before, on_exit comes instead."""
        turn = self._turn
        assert turn is not None

        def readable() -> None:
            loop.remove_reader(turn)
            if turn.recv(16):
                self.loaded = True
                on_loaded(self)

        loop.add_reader(turn, readable)

    def take_turn(self, loop: Loop, identity: Identity, incarnation: Incarnation, config: MeshConfig) -> bool:
        """Have a standby begin as this incarnation, now or as soon as it is loaded. False when it is gone."""
        assert self._turn is not None
        loop.remove_reader(self._turn)
        try:
            config_fd = config_file(config, identity.role)
            try:
                socket.send_fds(self._turn, [f"{identity} {incarnation}\n".encode()], [config_fd])
            finally:
                os.close(config_fd)
        except OSError:
            self.kill()
            return False
        self.identity, self.incarnation = identity, incarnation
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process; nothing happens when it is gone already."""
        self._process.send_signal(number)

    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or a terminal."""
        found = proc_stat.of(self.pid)
        if found is None:
            self.kill()
        return found is not None and found.state == "T"

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


USUAL = {"XDG_CACHE_HOME": ".cache", "TRITON_CACHE_DIR": ".triton/cache"}


def prepared(config: MeshConfig, say: Callable[[str, str], None]) -> dict[str, str]:
    """Variables to set for the workers of this mesh. Where they are not the usual ones that is said once."""
    changed, why = for_workers(config.resolved.device if config.resolved else "", os.environ)
    if why:
        say(why, "warning")
    return changed


def for_workers(device: str, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Variables to set for workers, and a line that says why; empty where the usual folders can be used."""
    changed, why = {}, []
    for variable in platforms.named(device).kernel_caches if device else ():
        folder = _usual(variable, environment)
        reason = "there is no home directory" if folder is None else _unusable(folder)
        if reason:
            name = USUAL[variable].replace("/", "-").strip(".")
            try:
                other = rundir.private(rundir.base_dir(environment) / rundir.CACHE) / name
            except (OSError, StartError) as error:
                return {}, f"kernels cannot be kept: {reason}; {error}"
            changed[variable] = str(other)
            why.append(f"{reason}: kernels are kept in {other}")
    return changed, "; ".join(why)


def _usual(variable: str, environment: Mapping[str, str]) -> Path | None:
    if environment.get(variable):
        return Path(environment[variable])
    try:
        return Path.home() / USUAL[variable]
    except RuntimeError:  # a user without a name, as in some containers
        return None


def _unusable(folder: Path) -> str:
    """Why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""
