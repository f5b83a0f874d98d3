"""Orders for another number of ranks: what the supervisor is asked, and what its answers are over HTTP."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec import Struct

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.schema import ScaleRequest
from meshlm.frontend.operator import mesh_operations as operations
from meshlm.frontend.operator.mesh_operations import MeshOperations
from meshlm.protocol.edges.control import RanksScaled, ScaleRanks
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.process.figures import Figures

Answer = Callable[[ScaleRanks], RanksScaled]


class Backend(MeshOperations):
    """One whose supervisor gives this answer; None: it is silent."""

    def __init__(self, answer: Answer | None) -> None:
        super().__init__(MeshClient(), Figures())
        self.orders: list[ScaleRanks] = []
        self._answer = answer

    def tell_supervisor(self, message: Struct) -> None:
        assert isinstance(message, ScaleRanks)
        self.orders.append(message)
        if self._answer is not None:
            asyncio.get_running_loop().call_soon(self.ranks.answered, self._answer(message))


async def test_the_answer_comes_with_the_end_of_the_change() -> None:
    backend = Backend(lambda asked: RanksScaled(asked.id, asked.num_ranks or 1))
    request = ScaleRequest(new_data_parallel_size=3, drain_timeout=5.0)
    assert await operations.scale(backend, request) == {"message": "Scaled to 3 data parallel engines"}
    assert [(asked.num_ranks, asked.drain_s) for asked in backend.orders] == [(3, 5.0)]


@pytest.mark.parametrize("doing", ["", "adding rank 1"])
async def test_whether_it_scales(doing: str) -> None:
    backend = Backend(lambda asked: RanksScaled(asked.id, 1, doing))
    assert await operations.is_scaling(backend) == {"is_scaling_elastic_ep": bool(doing)}
    assert [asked.num_ranks for asked in backend.orders] == [None]


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (lambda asked: RanksScaled(asked.id, 1, refused="--dp: these ranks share experts"), 409, "^these ranks share"),
        (lambda asked: RanksScaled(asked.id, 1, failed="scheduler/1 died"), 500, r"as before \(1\): scheduler/1 died"),
        (None, 504, "did not answer in 0 s"),
    ],
)
async def test_what_is_no_change(
    answer: Answer | None, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "LOAD_S", 0.01)
    with pytest.raises(HttpError, match=text) as caught:
        await operations.scale(Backend(answer), ScaleRequest(new_data_parallel_size=2))
    assert caught.value.status == status


async def test_a_late_answer_is_dropped() -> None:
    Backend(None).ranks.answered(RanksScaled("nobody", 1))
