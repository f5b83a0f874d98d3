"""Requests that no rank can take yet, because none that they may go to serves. Pure; core.py keeps them, in the order of arrival."""

from msgspec import Struct

from meshlm.protocol.edges.admit import Admit, Refused
from meshlm.protocol.wire.ids import ErrorKind, Identity, Incarnation
from meshlm.runtime.process.deaths import BEGUN_S, NEW_S


class Held(Struct, frozen=True):
    """`until`: when the coordinator gives it up."""

    sender: Identity
    incarnation: Incarnation
    admit: Admit
    until: float

    def refusal(self, now: float, wall_s: float) -> Refused | None:
        """The refusal with which it ends when its time is over; None before."""
        work, dp_rank = self.admit.work, self.admit.dp_rank
        if 0 < work.deadline_s <= wall_s:
            return Refused(work.handle, ErrorKind.TIMEOUT, "the request's timeout passed")
        if self.until > now:
            return None
        missing = "no scheduler" if dp_rank == -1 else f"no scheduler of rank {dp_rank}"
        return Refused(work.handle, ErrorKind.OVERLOADED, f"{missing} was ready within {_patience_s(self.admit):.0f} s")


def hold(sender: Identity, incarnation: Incarnation, admit: Admit, now: float) -> Held:
    return Held(sender, incarnation, admit, now + _patience_s(admit))


def _patience_s(admit: Admit) -> float:
    return BEGUN_S if admit.work.attempt or admit.work.output_token_ids else NEW_S
