"""Two ranks that say which weights they have, and a mesh of them."""

from typing import Any

import msgspec
from coordinator_bench import D0, F0, F1, LIFE, Bench, load

from meshlm.protocol import operations as ops
from meshlm.protocol.operations import CheckWeights, Operation, OperationDone, OperationId, UseWeights
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.events import Send

START = WeightsVersion()
FIRST = WeightsVersion(1, "one", "/b", "of b")


class Mesh(Bench):
    """Two ranks that say which weights they have."""

    def __init__(self, *ranks: Identity) -> None:
        super().__init__(F0, F1, D0, num_ranks=len(ranks))
        self.has: dict[Identity, WeightsVersion] = dict.fromkeys(ranks, START)
        for rank in ranks:
            self.join(rank)
            self.report(rank)

    def report(self, rank: Identity, life: int = LIFE, **more: Any) -> list[Send]:
        return self.says(rank, load(weights=self.has[rank], **more), life)

    def ask(self, action: ops.Action, name: str = "u", asker: Identity = F0) -> list[Send]:
        return self.says(asker, Operation(OperationId(name), action))

    def answer(self, asked: list[Send], error: str = "", digest: str = "of b") -> list[Send]:
        """All ranks answer what they were asked for."""
        sends: list[Send] = []
        for send in asked:
            if not isinstance(send.message, Operation):
                continue
            results = (msgspec.json.encode(digest),) if isinstance(send.message.action, CheckWeights) else ()
            if isinstance(send.message.action, UseWeights) and not error:
                self.has[send.to] = send.message.action.version
            sends += self.says(send.to, OperationDone(send.message.id, error, results=() if error else results))
            sends += self.report(send.to)
        return sends


def errors(sends: list[Send]) -> list[str]:
    return [send.message.error for send in sends if isinstance(send.message, OperationDone)]


def actions(sends: list[Send]) -> list[tuple[Identity, ops.Action]]:
    return [(send.to, send.message.action) for send in sends if isinstance(send.message, Operation)]
