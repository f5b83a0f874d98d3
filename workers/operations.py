"""Operations: what a worker does between two steps because it was asked to. Used by the stepper thread only (io.py).

Traces are torch's profiler's, as Chrome trace JSON (chrome://tracing, Perfetto): of the operations of the thread that starts it, and
all of the GPU's. POST /collective_rpc calls methods of the worker extension (--worker-extension-cls), a class of the user's that is
trusted as a plug-in is. Where one has changed the weights, the worker has another version of them from then on.
"""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, assert_never

import msgspec
import structlog

from meshlm.protocol import operations
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine import Engine
from meshlm.workers.weights.versions import HasWeights, WeightsRefused, WorkerWeights

if TYPE_CHECKING:
    from meshlm.workers.rows.extras.extra import RowExtras

_log = structlog.get_logger()
LOST = (
    "what it changes is in the memory of these workers alone; where it changes weights, a worker that is started anew after a death, a "
    "scaling or a sleep of level 2 takes no requests until the weights are updated; the prefix cache is forgotten at each call"
)
NONE = "start the server with --worker-extension-cls to have methods that can be called"


def kind_of(name: str) -> Any:
    """The class `module.Class` or `module:Class`. ProcessFatal where there is none."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything, and the user must read whose it is
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> ProcessFatal:
    return ProcessFatal(f"--worker-extension-cls {name}: {type(error).__name__}: {error}".splitlines()[0])


class Extension:
    """One object of the class, where there is one, with the attributes `engine`, `rank` (the worker's number in the mesh) and, where
    the engine has them, `model` and `device`."""

    def __init__(self, name: str, engine: Engine, rank: int) -> None:
        """name: `module.Class` or `module:Class`; empty: there is no class. ProcessFatal."""
        self._engine, self._has_warned = engine, False
        self._made: Any = None
        if not name:
            return
        kind = kind_of(name)
        try:
            self._made = kind()
            self._made.engine, self._made.rank = engine, rank
            for shown in ("model", "device"):
                setattr(self._made, shown, getattr(engine, shown, None))
        except Exception as error:  # it may raise anything, and the user must read whose it is
            raise _failed(name, error) from None

    def _warn(self) -> None:
        """Once in the mesh's log: nobody but this worker knows what its method does."""
        if not self._has_warned and self._made.rank == 0:
            _log.warning("a worker extension was called", note=LOST)
        self._has_warned = True

    def call(self, operation_id: operations.OperationId, asked: operations.CallWorkers) -> operations.OperationDone:
        """Its result as JSON, what JSON has not as text; or what went wrong."""
        if self._made is None:
            return operations.OperationDone(operation_id, NONE)
        kind = type(self._made).__name__
        method = None if asked.method.startswith("_") else getattr(type(self._made), asked.method, None)
        if not callable(method):
            return operations.OperationDone(operation_id, f"method: {kind} has no {asked.method!r}")
        self._warn()
        try:
            given = msgspec.json.decode(asked.arguments)
            result = method(self._made, *given["args"], **given["kwargs"])
            return operations.OperationDone(operation_id, results=(msgspec.json.encode(result, enc_hook=str),))
        except Exception as error:  # the user's code may raise anything; the worker goes on
            _log.exception("worker extension failed", method=asked.method)
            return operations.OperationDone(operation_id, f"{kind}.{asked.method}: {type(error).__name__}: {error}")


def load_profiler(folder: str) -> None:
    """Imports a trace's needs before the worker is ready: importing torch takes seconds, or a minute from a cold disk, when a worker
    of --device fake, which has no other use for it, took no step and gave /start_profile no answer."""
    if folder:
        importlib.import_module("torch.profiler")


class Profiler:
    """One trace at a time, into `folder` (--profiler-dir; "" refuses). `name` is the process's, for the file; `host` stands
    before the paths that are told."""

    def __init__(self, folder: str, name: str, host: str = "") -> None:
        self._folder, self._name, self._host = folder, name, host
        self._running: Any = None

    def handle(self, operation_id: operations.OperationId, *, start: bool) -> operations.OperationDone:
        """Begin or end a trace; what could not be done is in the answer's `error`."""
        if not self._folder:
            return operations.OperationDone(operation_id, "there is no directory for traces (--profiler-dir)")
        if start == (self._running is not None):
            state = "is running already" if start else "is not running"
            return operations.OperationDone(operation_id, f"{self._name}: the profiler {state}")
        try:
            return operations.OperationDone(operation_id, paths=() if start and self._start() else (self._stop(),))
        except (OSError, RuntimeError) as error:
            self._running = None
            return operations.OperationDone(operation_id, f"{self._name}: --profiler-dir {self._folder}: {error}")

    def _start(self) -> bool:
        import torch

        Path(self._folder).mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._running = profile
        return True

    def _stop(self) -> str:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profile, self._running = self._running, None
        profile.stop()
        path = Path(self._folder) / f"{self._name}.{time.time_ns() // 1_000_000}.pt.trace.json"
        profile.export_chrome_trace(str(path))
        return self._host + str(path.resolve())


MAX_KNOWN = 64  # answers that are kept for who asks again


class Operated(HasWeights, Protocol):
    """The part of an engine that operations change."""

    @property
    def extras(self) -> "RowExtras[Any]": ...

    def rebalance(self) -> str: ...


class Operations:
    """Each operation is done once in the life of the worker."""

    def __init__(
        self,
        config: MeshConfig,
        identity: Identity,
        worker: tuple[Operated, WorkerWeights],
        extension: Extension | None = None,
        on_call: Callable[[operations.OperationId], None] = lambda _: None,
    ) -> None:
        """on_call: is told before a method of the user's is called, who may change anything."""
        self._extension, self._on_call = extension, on_call
        self._engine, self._weights = worker
        node = config.node
        # files of other nodes are told from the head's
        host = f"{node.host}:" if node is not None and node.index else ""
        self._profiler = Profiler(config.worker.profiler_dir, f"{identity.role.value}-{identity.index}", host)
        self._done: dict[operations.OperationId, operations.OperationDone] = {}

    def do(self, operation: operations.Operation) -> operations.OperationDone:
        """The answer, or the same again where it was done already."""
        done = self._done.get(operation.id)
        if done is None or done.weights not in (None, self._weights.version):  # else it has lost what the call changed
            self._done[operation.id] = done = self._do(operation)
            if len(self._done) > MAX_KNOWN:
                del self._done[next(iter(self._done))]
        return done

    def _do(self, operation: operations.Operation) -> operations.OperationDone:
        match operation.action:
            case operations.Profile(start=start):
                return self._profiler.handle(operation.id, start=start)
            case operations.DropAdapter(digest=digest):
                self._engine.extras.drop(digest)
                return operations.OperationDone(operation.id)
            case operations.RebalanceExperts():
                return operations.OperationDone(operation.id, self._engine.rebalance())
            case operations.CallWorkers() as asked:
                return self._call(operation.id, asked)
            case operations.CheckWeights(source=source):
                return self._check(operation.id, source)
            case operations.SumWeights():
                total = self._engine.sum_weights()
                return operations.OperationDone(operation.id, results=(msgspec.json.encode(total),))
            case (
                operations.Stop()
                | operations.Pause()
                | operations.Resume()
                | operations.Sleep()
                | operations.WakeUp()
                | operations.AbortRunning()
                | operations.BeginUpdate()
                | operations.StageWeights()
                | operations.FinishUpdate()
                | operations.UpdateWeights()
                | operations.NameWeights()
                | operations.UseWeights()
                | operations.StageTensors()
                | operations.JoinTrainer()
                | operations.ReceiveWeights()
                | operations.EndTransfer()
            ):  # others alone have a part in it
                return operations.OperationDone(operation.id)
            case operations.ResetPrefixCache():  # the mirror forgot it in the event loop, in order with what plans remember
                return operations.OperationDone(operation.id)
            case _:
                assert_never(operation.action)

    def _call(self, operation_id: operations.OperationId, asked: operations.CallWorkers) -> operations.OperationDone:
        """Weights that are others afterwards are another version, which nobody can read again."""
        self._on_call(operation_id)
        if self._extension is None:
            return operations.OperationDone(operation_id, NONE)
        before = self._engine.sum_weights()
        done = self._extension.call(operation_id, asked)
        if self._engine.sum_weights() == before:
            return done
        self._engine.extras.weights_changed()
        self._weights.version = version = self._weights.version.after_call(operation_id)
        return msgspec.structs.replace(done, weights=version)

    def _check(self, operation_id: operations.OperationId, source: str) -> operations.OperationDone:
        try:
            digest = self._weights.check(self._engine, source)
        except WeightsRefused as error:
            return operations.OperationDone(operation_id, str(error))
        return operations.OperationDone(operation_id, results=(msgspec.json.encode(digest),))
