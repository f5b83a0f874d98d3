"""Messages that the coordinator makes of what it knows of ranks and their requests. Pure; called by core.py."""

from collections.abc import Iterable

from meshlm.coordinator.ledger import Rank
from meshlm.protocol.edges import admit as edge
from meshlm.protocol.operations import Operation, OperationId, Pause
from meshlm.protocol.wire.ids import ErrorKind, Identity
from meshlm.runtime.process.events import Send


def late_pauses(ranks: Iterable[Rank]) -> list[Send]:
    """For schedulers that began while the mesh was paused, and do not know it."""
    return [pause(rank) for rank in ranks if rank.load is not None and not rank.load.paused]


def pause(rank: Rank) -> Send:
    """The operation by which a rank that begins in a paused mesh is paused."""
    return Send(rank.identity, Operation(OperationId(f"pause-{rank.incarnation}"), Pause()))


def readmit(returned: list[edge.Returned]) -> edge.Readmit:
    """The message that has their detokenizer admit these requests again."""
    num_crashes = tuple(one.num_crashes for one in returned)
    handles = tuple(one.handle for one in returned)
    return edge.Readmit(handles, num_crashes if any(num_crashes) else (), handed_off=returned[0].handed_off)


def readmits(found: dict[tuple[Identity, bool], list[edge.Returned]]) -> list[Send]:
    """One for each detokenizer, and for requests that were handed off."""
    return [Send(identity, readmit(back)) for (identity, _), back in found.items()]


def no_such_rank(admit: edge.Admit, first: int, num_ranks: int) -> edge.Refused | None:
    """The refusal of a new request that names a rank which this mesh does not have. Clients count its ranks from `first`."""
    work, last = admit.work, first + num_ranks - 1
    if admit.dp_rank == -1 or work.attempt or admit.again or first <= admit.dp_rank <= last:
        return None
    name = "X-data-parallel-rank"
    ranks = f"ranks {first} to {last}" if num_ranks > 1 else f"rank {first} only"
    text = f"{name}: there is no rank {admit.dp_rank}; this mesh has {ranks}"
    return edge.Refused(work.handle, ErrorKind.INVALID, text, name)


def no_turns(num_ranks: int, steps_together: bool, is_asleep: bool, is_paused: bool) -> str:
    """Why ranks cannot change their weights one after another; empty: they can."""
    if steps_together:
        return "rolling: ranks that share experts step together, and change their weights together"
    if num_ranks < 2:
        return "rolling: while one rank changes its weights another one serves; there is one rank only (-dp)"
    if is_asleep:
        return "rolling: the workers sleep (POST /wake_up)"
    return "rolling: the mesh is paused (POST /resume)" if is_paused else ""
