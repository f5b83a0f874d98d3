"""What is replaced in the product's modules, so that they run in a simulated world: sockets, logs, clocks, threads."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import two_hosts
from clients import LOADED, TABLE
from network import Inbox, Outbox, running

from meshlm.coordinator import io as coordinator_io
from meshlm.coordinator import rehome, roles, routing
from meshlm.detokenizer import io as detokenizer_io
from meshlm.frontend import io as frontend_io
from meshlm.runtime.client import mesh_client
from meshlm.runtime.mesh import links as links_module
from meshlm.runtime.mesh import mesh as mesh_module
from meshlm.runtime.mesh import remote as remote_module
from meshlm.runtime.model_files import manifest
from meshlm.scheduler_proc import io as scheduler_io
from meshlm.scheduler_proc.connectors import holder, transfers
from meshlm.supervisor.nodes import network as supervisor_network
from meshlm.workers import io as worker_io
from meshlm.workers.distributed import membership
from meshlm.workers.weights import versions

LEASE_NS = 3_000_000_000  # of a lease: a history waits until all have ended


class _Log:
    """structlog costs more than a whole message; what is said goes into the story."""

    def __init__(self, **bound: object) -> None:
        self._process = bound.get("process")

    def bind(self, **bound: object) -> "_Log":
        return _Log(**bound)

    def debug(self, event: str, **fields: object) -> None:
        process = running()
        if process.world.story is not None:
            process.world.tell(process, "logs", process.identity, f"{event} {fields}")

    info = warning = error = exception = debug


class _Clock:
    """In the place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return running().world.now

    time = monotonic

    @staticmethod
    def monotonic_ns() -> int:
        return int(running().world.now * 1e9)


class _Threads:
    """In the place of the detokenizer's; that it takes a moment is Loop.call_soon_threadsafe's."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., object], *arguments: object) -> None:
        work(*arguments)


_decoder = cache(msgspec.msgpack.Decoder)  # making one costs as much as twenty messages


@contextmanager
def simulated() -> Iterator[None]:
    """Sockets, logs and clocks of the product are simulated within."""
    fast = SimpleNamespace(msgpack=SimpleNamespace(Decoder=_decoder), MsgspecError=msgspec.MsgspecError)
    with ExitStack() as stack:
        for module, name, fake in (
            (mesh_module, "Inbox", Inbox),
            (links_module, "Outbox", Outbox),
            (mesh_module, "descriptors", SimpleNamespace(context=lambda *_: None, claim=lambda *_: None)),
            (mesh_module, "TICK_S", 0.2),
            (mesh_module, "TICK_REMOTE_S", 0.2),  # a fifth of the time is ticks in which nothing is due
            (mesh_module, "TICK_CONNECTING_S", 0.03),
            (remote_module, "Inbox", Inbox),
            (remote_module, "Outbox", Outbox),
            (remote_module, "tcp", two_hosts.tcp),
            (remote_module, "keys", two_hosts.keys),
            (remote_module, "Strangers", two_hosts.Strangers),
            (supervisor_network, "agreement", SimpleNamespace(facts=lambda config: {}, differences=lambda *_: "")),
            (worker_io, "threading", two_hosts.threading),
            (worker_io, "sys", SimpleNamespace(setswitchinterval=lambda seconds: None)),
            (worker_io, "time", _Clock),
            (membership, "time", _Clock),
            (membership, "POLL_S", 0.0),
            (links_module, "msgspec", fast),
            (links_module, "zmq", SimpleNamespace(ZMQError=OSError)),
            (mesh_module, "_log", _Log()),
            (versions, "_log", _Log()),
            (detokenizer_io, "tokenizer_files", SimpleNamespace(load=lambda path: LOADED)),
            (detokenizer_io, "TokenTable", lambda loaded: TABLE),
            (detokenizer_io, "ThreadPoolExecutor", _Threads),
            (frontend_io, "time", _Clock),
            (mesh_client, "time", _Clock),
            (coordinator_io, "time", _Clock),
            (roles, "SHORT_PROMPT", 2),
            (routing, "SPILL", 4.0),
            (rehome, "SPILL", 4.0),
            (holder, "LEASE_NS", LEASE_NS),
            (transfers, "LEASE_S", LEASE_NS / 1e9),
            (scheduler_io, "time", _Clock),
            (manifest, "read", lambda run_dir: running().world.weights.get(run_dir)),
            (manifest, "write", lambda run_dir, version: running().world.weights.update({run_dir: version})),
        ):
            stack.enter_context(patch.object(module, name, fake, create=True))
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
