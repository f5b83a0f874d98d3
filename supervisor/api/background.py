"""A mesh and its client (client.py) in a background thread with an event loop of its own, and the requests that run there while the
program does something else (`enqueue`). Owned by llm.py, and ends with that."""

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import uvloop
from tqdm import tqdm

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.client.draft_metrics import drafts_told
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.deaths import allowed
from meshlm.supervisor import io
from meshlm.supervisor.api.client import Client, Sent
from meshlm.supervisor.api.outputs import RequestOutput
from meshlm.supervisor.api.sampling import SamplingParams
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.errors import ContextDoesNotFit, StartError
from meshlm.supervisor.processes import rundir
from meshlm.supervisor.settings import placement

STOP_S = 5.0
SHUT_DOWN = "this LLM was shut down"
NOT_HERE = "this LLM belongs to the process that made it; a fork of that process needs one of its own"

T = TypeVar("T")
Bar = bool | Callable[..., Any]  # whether there is one, or what makes it, with the arguments of tqdm


class Background:
    """All processes are ready once it is made. StartError says why not."""

    def __init__(self, config: MeshConfig) -> None:
        self._pid = os.getpid()
        base = rundir.base_dir(os.environ)
        rundir.remove_dead(base)
        self._folder = contextlib.ExitStack()
        path = self._folder.enter_context(rundir.taken(base / f"{rundir.LLM_PREFIX}{secrets.token_hex(4)}"))
        run = msgspec.structs.replace(config.run, run_dir=str(path))
        self.config: MeshConfig = msgspec.structs.replace(config, run=run)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshlm", daemon=True)
        self._thread.start()
        try:
            self.supervisor, self.client = self._call(self._start())
        except BaseException:
            self._end()
            raise

    def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Asks the mesh. StartError when that ends first, with its reason: nobody would answer any more."""
        return _result(self.start(unless_ended(self.supervisor, work)))

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have it done in the mesh's loop, for somebody who does not wait here."""
        if not self._loop.is_running() or os.getpid() != self._pid:
            work.close()
            raise RuntimeError(SHUT_DOWN if os.getpid() == self._pid else NOT_HERE)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End all processes, the loop and its thread. A fork of the process has none of them, and nothing to end."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:  # which held the last reference, and cannot wait for itself
            threading.Thread(target=self.stop, name="meshlm stop").start()
            return
        self._call(self._stop())
        self._end()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return _result(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _start(self) -> tuple[io.Supervisor, Client]:
        members = [identity for identity in placement.identities(self.config) if identity.role is not Role.FRONTEND]
        process = "supervisor" if self.config.run.log_format == "json" else None
        supervisor = io.Supervisor(self.config, members, StartDisplay(process=process))
        client = Client()
        client.mesh_client.set_max_deaths(allowed(self.config.run.max_restarts))
        client.counts.max_model_len = self.config.require_resolved().max_model_len
        client.counts.drafts_told = drafts_told(self.config)
        me, incarnation = Identity(Role.FRONTEND, 0), Incarnation(time.time_ns())
        client.mesh_client.mesh = mesh = Mesh(me, incarnation, self.config, client)
        client.media_reader.client.send = mesh.send
        try:
            await supervisor.start()
            await mesh.open()
            # All of them: until then the death of any ends the start, also when requests are served already.
            await unless_ended(supervisor, supervisor.ready.wait())
            await unless_ended(supervisor, client.serving.wait())
        except BaseException:
            supervisor.ended.cancel()  # nobody asks any more how it ended
            await mesh.close()
            await supervisor.close()
            raise
        return supervisor, client

    async def _stop(self) -> None:
        self.supervisor.stop(0.0)
        await asyncio.wait({self.supervisor.ended}, timeout=STOP_S)
        if (mesh := self.client.mesh_client.mesh) is not None:
            await mesh.close()
        await self.supervisor.close()

    def _end(self) -> None:
        async def settle() -> None:
            if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(tasks, timeout=STOP_S)

        self._call(settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._folder.close()


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:  # Ctrl-C: nobody waits for it any more
        future.cancel()
        raise


ENDED = "the mesh has ended"  # in good order, or by an error that is none of ours


async def unless_ended(supervisor: io.Supervisor, work: Coroutine[Any, Any, T], ended: str = ENDED) -> T:
    """Gives what `work` gives, or raises StartError with the reason when the mesh ends before; `ended` where it has none."""
    task = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, supervisor.ended}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    raise end_of(supervisor, ended)


def end_of(supervisor: io.Supervisor, ended_in_order: str = ENDED) -> StartError:
    """Why the mesh has ended. An error that is raised again and again keeps the frames of all who raised it, so each call gets one of
    its own."""
    ended = supervisor.ended
    found = ended.exception() if ended.done() and not ended.cancelled() else None
    if isinstance(found, ContextDoesNotFit):
        return ContextDoesNotFit(str(found), found.fits)
    return StartError(str(found) if isinstance(found, StartError) else ended_in_order)


class Enqueued:
    """Those that nobody has waited for, in their order."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._batches: list[tuple[Future[list[RequestOutput]], Sequence[SamplingParams]]] = []  # one a call

    def add(self, submits: Sequence[Sent], each: Sequence[SamplingParams]) -> list[str]:
        """Send them, and do not wait: the ids of the requests."""
        run = self._background.client.run(submits, None)
        work = self._background.start(unless_ended(self._background.supervisor, run))
        self._batches.append((work, each))
        return [sent.request.request_id for sent in submits]

    def wait(self, use_tqdm: Bar) -> list[RequestOutput]:
        """The results of all. Where a batch fails the others end all the same before its error is raised."""
        batches, self._batches = self._batches, []
        total = sum(one.n for _, each in batches for one in each)
        found: list[RequestOutput] = []
        errors: list[Exception] = []
        try:
            with progress_bar(use_tqdm, total, "Generating") as bar:
                for work, each in batches:
                    try:
                        found += finished(work.result(), each)
                    except (ValueError, StartError) as error:
                        errors.append(error)
                    bar.update(sum(one.n for one in each))
        except BaseException:  # Ctrl-C: nobody waits for them any more
            for work, _ in batches:
                work.cancel()
            raise
        if errors:
            raise errors[0]
        return found


def progress_bar(use_tqdm: Bar, total: int, what: str) -> Any:
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=what, disable=not use_tqdm, dynamic_ncols=True)


def finished(found: list[RequestOutput], each: Sequence[SamplingParams]) -> list[RequestOutput]:
    """The same, without the text of those that asked for none."""
    for request, one in zip(found, each, strict=True):
        if not one.detokenize:
            for output in request.outputs:
                output.text = ""
    return found
