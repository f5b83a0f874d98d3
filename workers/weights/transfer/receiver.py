"""What a worker does for a trainer that sends weights: joins its group, receives tensors, ends that. Owned by io.py.

One thing at a time, each in a thread of its own: the steps go on. What the coordinator asks is answered once, by the thread or, where
it is ended before, by who ends it. All workers receive what is broadcast; the first one keeps it (kept.py), and what it cannot keep
it receives all the same, so that the trainer's call comes to an end.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.operations import EndTransfer, JoinTrainer, Operation, OperationDone, ReceiveWeights
from meshlm.protocol.weight_transfer import GROUPS, JoinInfo, TensorInfo, UpdateInfo, checked_update
from meshlm.runtime.model_files import received

if TYPE_CHECKING:
    import torch

    from meshlm.workers.weights.transfer.groups import Broadcasts
    from meshlm.workers.weights.transfer.source import WeightSource

_log = structlog.get_logger()
NOT_JOINED = "this worker is in no trainer's group; POST /init_weight_transfer_engine comes first, and again after a worker was lost"
OTHER_TRAINER = (
    'another trainer updates the weights, and is there; POST /finish_weight_update with {"abort": true} ends its turn'
)
ENDED = "the weight update was ended"


class _Job:
    def __init__(self, operation: Operation) -> None:
        self.id, self.joins = operation.id, isinstance(operation.action, JoinTrainer)
        self.done: OperationDone | None = None


class WeightReceiver:
    """`index`: of this worker in the mesh. `say` sends an answer to the scheduler, `device` is the engine's; both from any thread."""

    def __init__(
        self, config: MeshConfig, index: int, say: Callable[[Struct], None], device: Callable[[], "torch.device"]
    ) -> None:
        self._config, self._index, self._say, self._device = config, index, say, device
        self._backend = config.worker.weight_transfer
        self._source: WeightSource | None = None
        self._job: _Job | None = None
        self._answered: OperationDone | None = None  # the newest: it is asked for again in a new session
        self._lock = threading.Lock()

    def handle(self, operation: Operation) -> None:
        """From the event loop. The answer follows."""
        match operation.action:
            case JoinTrainer(info=info, if_gone=if_gone):
                given = msgspec.json.decode(info, type=JoinInfo)
                self._begin(operation, partial(self._join, given, if_gone=if_gone))
            case ReceiveWeights() as asked:
                self._begin(operation, partial(self._receive, asked))
            case EndTransfer(keep=keep):
                self.end(ENDED)
                if not self._index:
                    received.remove_others(received.folder_of(Path(self._config.run.run_dir)), keep)
                self._say(OperationDone(operation.id))

    def session_ended(self) -> None:
        """What is being received comes to an end. A group that is being joined does not hang on the session."""
        job = self._job
        if job is not None and not job.joins:
            self.end("the rank's session ended; a worker was lost, or is about to sleep")

    def end(self, reason: str) -> None:
        """Ends what is being done, if anything: its group is of no more use."""
        with self._lock:
            job, self._job = self._job, None
            source, self._source = (None, self._source) if job is None else (self._source, None)
        if source is not None:
            source.abort()
        if job is not None:
            self._answer(job, reason)

    def _begin(self, operation: Operation, work: Callable[[_Job], None]) -> None:
        if self._job is not None and self._job.id == operation.id:  # asked again
            return
        if self._answered is not None and self._answered.id == operation.id:
            self._say(self._answered)
            return
        self.end("another call of a trainer followed")
        self._job = job = _Job(operation)
        threading.Thread(target=self._run, args=(job, work), name="weights", daemon=True).start()

    def _run(self, job: _Job, work: Callable[[_Job], None]) -> None:
        from meshlm.workers.weights.transfer.source import TransferFailed

        error = ""
        try:
            work(job)
        except TransferFailed as failed:
            error = str(failed)
        except Exception as failed:  # of libraries, in a thread: the trainer is told, and the worker serves on
            _log.exception("weights were not received")
            error = f"{type(failed).__name__}: {failed}".splitlines()[0]
        with self._lock:
            if self._job is job:
                self._job = None
        self._answer(job, error)

    def _answer(self, job: _Job, error: str) -> None:
        with self._lock:
            if job.done is not None:
                return
            self._answered = job.done = OperationDone(job.id, f"worker-{self._index}: {error}" if error else "")
        self._say(job.done)

    def _join(self, info: JoinInfo, job: _Job, *, if_gone: bool) -> None:
        from meshlm.workers.weights.transfer.groups import Broadcasts, GlooGroup
        from meshlm.workers.weights.transfer.source import TransferFailed

        if if_gone and (source := self._source) is not None and source.has_trainer():
            raise TransferFailed(OTHER_TRAINER)
        with self._lock:
            before, self._source = self._source, None
        if before is not None:
            before.abort()
        assert info.rank_offset is not None
        rank, device = info.rank_offset + self._index, self._device()

        def is_wanted() -> bool:
            return self._job is job

        if self._backend == "gloo":
            source = Broadcasts(GlooGroup(info, rank, is_wanted), info)
        else:
            from meshlm.workers.weights.transfer.nccl import NcclGroup

            source = Broadcasts(NcclGroup(info, rank, device, is_wanted), info)
        with self._lock:
            if is_joined := is_wanted():
                self._source = source
        if not is_joined:
            source.abort()

    def _receive(self, asked: ReceiveWeights, job: _Job) -> None:
        from meshlm.workers.weights.transfer.groups import Broadcasts
        from meshlm.workers.weights.transfer.kept import KeptFile
        from meshlm.workers.weights.transfer.memory import HostMemory
        from meshlm.workers.weights.transfer.source import TransferFailed

        info = msgspec.json.decode(asked.info, type=UpdateInfo)
        tensors = checked_update(info, self._backend)
        keeps, failed = self._index == 0, ""
        if self._backend in GROUPS:
            if (source := self._source) is None:
                raise TransferFailed(NOT_JOINED)
        else:
            source = HostMemory(self._device())
            if not keeps:
                return
            with self._lock:
                self._source = source
        if info.num_updates_list is not None:
            assert isinstance(source, Broadcasts)
            self._receive_changes(asked, info.num_updates_list, source, tensors)
            return
        kept: KeptFile | None = None
        if keeps:
            try:
                model_path = self._config.require_resolved().model_path
                kept = KeptFile(Path(asked.folder), asked.number, tensors, model_path)
            except TransferFailed as error:
                failed = str(error)
        try:
            for own, data in source.receive(info, tensors):
                if kept is not None:
                    kept.take(own, data)
        except TransferFailed:
            self._leave(source)
            raise
        if failed:
            raise TransferFailed(failed)
        if kept is not None:
            kept.finish()

    def _receive_changes(
        self, asked: ReceiveWeights, counts: list[int], source: "Broadcasts", tensors: tuple[TensorInfo, ...]
    ) -> None:
        from meshlm.workers.weights.transfer.changed import ChangedFile
        from meshlm.workers.weights.transfer.source import TransferFailed

        changed: ChangedFile | None = None
        failed = ""
        try:
            if not self._index:
                model_path = self._config.require_resolved().model_path
                changed = ChangedFile(Path(asked.folder), asked.number, asked.base, model_path)
        except TransferFailed as error:
            failed = str(error)
        try:
            for tensor, places, values in source.receive_changes(tensors, counts):
                if changed is not None and not failed:
                    try:
                        changed.change(tensor, places, values)
                    except TransferFailed as error:
                        failed = str(error)
        except TransferFailed:
            self._leave(source)
            raise
        if failed:
            raise TransferFailed(failed)
        if changed is not None:
            changed.finish()

    def _leave(self, source: "WeightSource") -> None:
        """Its trainer is lost."""
        source.abort()
        with self._lock:
            self._source = None if self._source is source else self._source
