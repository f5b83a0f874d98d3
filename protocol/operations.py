"""Operations, which change workers between two steps: a profiler trace, a reset of the prefix cache, experts that move, their end.

An `Operation` goes from whoever asks (a frontend, the supervisor) to the coordinator, from there to every scheduler, and from each
scheduler to its workers, in order with the plans: all workers of a rank do it before the same step. `OperationDone` comes back on the
same road, at each process once all of those that it asked have answered. An operation has an id: a worker that is asked again, because
another worker of its rank was lost meanwhile, does not do it twice. A new operation is one more struct in `Action`.
"""

from collections.abc import Collection
from typing import NewType

from msgspec import Struct

from meshlm.protocol.weights import RollMode, WeightsVersion

OperationId = NewType("OperationId", str)  # unique in the mesh


class Profile(Struct, frozen=True, tag="profile"):
    """Begin or end a trace in every worker (--profiler-dir)."""

    start: bool


class ResetPrefixCache(Struct, frozen=True, tag="reset_prefix_cache", omit_defaults=True):
    """No later request finds what is computed now. It fails while requests run, or with `preempt` computes those anew."""

    preempt: bool = False


class RebalanceExperts(Struct, frozen=True, tag="rebalance_experts"):
    """Experts move to where ranks have as many tokens each (--enable-eplb), before the next step that all ranks take."""


class Pause(Struct, frozen=True, tag="pause"):
    """No step is planned until Resume: requests keep their tokens and their places, and new ones wait. abort: those that are there
    end. wait: those that have begun run to their end."""

    abort: bool = False
    wait: bool = False


class Resume(Struct, frozen=True, tag="resume"):
    """Steps are planned again."""


class Sleep(Struct, frozen=True, tag="sleep", omit_defaults=True):
    """Workers give the memory of their devices back, and what is computed is forgotten. level 1: weights go to the host's memory; 2:
    they are dropped, and are loaded again by WakeUp. Requests keep their tokens."""

    level: int = 1


class WakeUp(Struct, frozen=True, tag="wake_up", omit_defaults=True):
    """Workers take their memory again: that of these tags (sleeping.py), or all."""

    tags: tuple[str, ...] = ()


class CallWorkers(Struct, frozen=True, tag="call_workers", omit_defaults=True):
    """Every worker calls this method of its extension (--worker-extension-cls). arguments: JSON, an object of `args` and `kwargs`."""

    method: str
    arguments: bytes
    limit_s: float = 1800.0


class BeginUpdate(Struct, frozen=True, tag="begin_update", omit_defaults=True):
    """A trainer is about to update the weights, step by step: others may not until it has finished. rolling: one rank alone
    checks them, while others serve. The coordinator's alone, like the next five."""

    rolling: bool = False


class StageWeights(Struct, frozen=True, tag="stage_weights"):
    """All workers find out whether they can have the weights of this folder. Nothing changes yet. Between BeginUpdate and its end."""

    source: str


class StageTensors(Struct, frozen=True, tag="stage_tensors"):
    """All workers receive tensors of a trainer into the host's memory. Nothing changes yet. Between BeginUpdate and its end, as often
    as it takes. info: JSON, UpdateInfo of weight_transfer.py."""

    info: bytes


class FinishUpdate(Struct, frozen=True, tag="finish_update", omit_defaults=True):
    """All workers take what was staged, under this name. keep_kv: requests that run go on with the KV of the old weights; else it is
    computed anew. drop: nothing is taken, the trainer's turn is over. rolling: ranks take them one after another (Roll.mode); None: all
    at once."""

    name: str = ""
    keep_kv: bool = False
    drop: bool = False
    rolling: RollMode | None = None


class UpdateWeights(Struct, frozen=True, tag="update_weights", omit_defaults=True):
    """All three at once. source: empty: where the weights were read before, whose files may be others now. rolling: as in FinishUpdate,
    and one rank alone checks them."""

    source: str = ""
    name: str = ""
    keep_kv: bool = False
    rolling: RollMode | None = None


class NameWeights(Struct, frozen=True, tag="name_weights"):
    """The weights stay, and are called so from now on."""

    name: str


class CheckWeights(Struct, frozen=True, tag="check_weights"):
    """Workers find out whether they can have the weights of `source`, and answer with the digest of its files."""

    source: str


class UseWeights(Struct, frozen=True, tag="use_weights", omit_defaults=True):
    """Workers have these weights from the beginning of the next session on. It is answered when all have."""

    version: WeightsVersion
    keep_kv: bool = False  # as in FinishUpdate


class JoinTrainer(Struct, frozen=True, tag="join_trainer", omit_defaults=True):
    """Each worker joins the group of a trainer that will broadcast weights. info: JSON, JoinInfo of weight_transfer.py. if_gone: only
    if the trainer of the group that it is in is there no more."""

    info: bytes
    if_gone: bool = False


class ReceiveWeights(Struct, frozen=True, tag="receive_weights"):
    """Workers receive tensors of the trainer beside their steps; the first one writes them to a file of this number in the folder.
    base: the weights that the mesh has, of which some numbers may be sent alone."""

    folder: str
    number: int
    info: bytes  # as in StageTensors
    base: WeightsVersion


class EndTransfer(Struct, frozen=True, tag="end_transfer", omit_defaults=True):
    """Workers receive no more, and forget what was received but for this folder, which holds the mesh's weights."""

    keep: str = ""


class SumWeights(Struct, frozen=True, tag="sum_weights"):
    """Each worker adds up all bytes of its weights."""


class AbortRunning(Struct, frozen=True, tag="abort_running"):
    """Requests end with FinishReason.ABORT: those that clients know by these names, or all."""

    request_ids: tuple[str, ...] = ()


class DropAdapter(Struct, frozen=True, tag="drop_adapter"):
    """No new request will have the adapter of this digest: its memory is free once its last row is gone."""

    digest: bytes


class Stop(Struct, frozen=True, tag="stop"):
    """The mesh ends: schedulers plan no step any more, and what was planned before is computed."""


OfCoordinator = BeginUpdate | StageWeights | StageTensors | FinishUpdate | UpdateWeights | NameWeights
OfTransfer = JoinTrainer | ReceiveWeights | EndTransfer  # done beside the steps, by a thread of its own
OnlyOnce = JoinTrainer | ReceiveWeights  # over for all as soon as one of those that were asked is lost, or fails
Action = (
    Profile
    | ResetPrefixCache
    | RebalanceExperts
    | Pause
    | Resume
    | Sleep
    | WakeUp
    | CallWorkers
    | AbortRunning
    | DropAdapter
    | Stop
    | OfCoordinator
    | CheckWeights
    | UseWeights
    | SumWeights
    | OfTransfer
)
LONG = (  # a model is read, or sent
    Sleep
    | WakeUp
    | StageWeights
    | StageTensors
    | FinishUpdate
    | UpdateWeights
    | CheckWeights
    | UseWeights
    | ReceiveWeights
)


def limit_s(action: Action) -> float:
    """The seconds that ranks may take for it: to write a long trace takes a while, to load a large model a longer one."""
    if isinstance(action, CallWorkers):
        return action.limit_s
    return 1800.0 if isinstance(action, LONG) else 120.0


class Operation(Struct, frozen=True, tag="operation"):
    id: OperationId
    action: Action


class OperationDone(Struct, frozen=True, tag="operation_done", omit_defaults=True):
    """The answer to Operation: the files that were written, or why it was not done."""

    id: OperationId
    error: str = ""
    paths: tuple[str, ...] = ()
    count: int = 0  # requests that it ended
    results: tuple[bytes, ...] = ()  # JSON, of each worker that called a method, checked or summed weights
    weights: WeightsVersion | None = None  # that a worker has since a method changed them; None: as before


def combine(operation_id: OperationId, answers: Collection[OperationDone]) -> OperationDone:
    """One answer out of those of all who were asked: the first error, or the files of all."""
    error = next((answer.error for answer in answers if answer.error), "")
    paths = () if error else tuple(path for one in answers for path in one.paths)
    results = () if error else tuple(result for one in answers for result in one.results)
    changed = max((one.weights for one in answers if one.weights is not None), key=lambda one: one.number, default=None)
    return OperationDone(operation_id, error, paths, sum(answer.count for answer in answers), results, changed)
