"""Messages that the coordinator makes of what it knows of ranks and their requests. Pure; called by core.py."""

from collections.abc import Iterable

from meshlm.coordinator.ledger import Rank
from meshlm.protocol.edges import admit as edge
from meshlm.protocol.operations import Operation, OperationId, Pause
from meshlm.protocol.wire.ids import Identity
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
