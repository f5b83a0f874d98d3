"""POST /invocations of a server of vectors: against a frontend without a mesh."""

from array import array
from typing import Any

import pytest
from msgspec.structs import replace
from scripted import Scripted, post

from meshlm.protocol.edges.text import Submit
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.pooling import PoolingSpec, PoolingTask
from meshlm.runtime.client.placement import Choice

MESSAGES = [{"role": "user", "content": "hi"}]


class Vectors(Scripted):
    """Each text gets the same two numbers."""

    def __init__(self, tasks: tuple[PoolingTask, ...]) -> None:
        plain = Scripted().resolved
        spec = PoolingSpec(tasks=tasks, kind=PoolKind.LAST, size=2)
        super().__init__(resolved=replace(plain, pooling=spec))
        self.pieces = ()

    def open(self, choices: list[Choice], submit: Submit) -> None:
        for choice in choices:
            choice.pooled = array("f", [0.25, 0.75]).tobytes()
        super().open(choices, submit)


@pytest.mark.parametrize("body", [{"input": "hi"}, {"messages": MESSAGES}])
@pytest.mark.parametrize(
    ("tasks", "given"),
    [
        (("embed", "token_embed"), {"object": "embedding", "embedding": [0.25, 0.75]}),
        (("classify", "token_classify"), {"label": "LABEL_1", "probs": [0.25, 0.75], "num_classes": 2}),
        (("token_classify", "classify"), {"object": "pooling"}),
        (("token_embed",), {"object": "pooling"}),
    ],
)
async def test_inputs_and_messages_go_where_the_model_answers(
    tasks: tuple[PoolingTask, ...], given: dict[str, Any], body: dict[str, Any]
) -> None:
    (found,) = (await post(Vectors(tasks), "/invocations", body))["data"]
    assert given.items() <= found.items()


async def test_a_task_is_for_pooling() -> None:
    (found,) = (await post(Vectors(("embed", "token_embed")), "/invocations", {"input": "hi", "task": "embed"}))["data"]
    assert found == {"index": 0, "object": "pooling", "data": [0.25, 0.75]}


async def test_what_is_for_no_route_says_what_there_is() -> None:
    error = (await post(Vectors(("classify",)), "/invocations", {"prompt": "hi"}, 400))["error"]
    assert "input (/classify), messages (/classify)" in error["message"]
