"""Calls of a worker extension's methods (--worker-extension-cls), and of reload_weights, as `LLM.collective_rpc` makes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshlm.protocol.operations import CallWorkers
from meshlm.supervisor.api.sleep import Operated


async def call(
    mesh: Operated, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[Any]:
    """What the method gives, in the order of the workers; of reload_weights None for each. ValueError says what went wrong."""
    if not isinstance(method, str):
        raise ValueError("method: must be the name of a method of worker_extension_cls; functions are not sent")
    arguments = msgspec.json.encode({"args": list(args), "kwargs": dict(kwargs or {})})
    limit = {} if timeout is None else {"limit_s": timeout}
    for step in (
        ("verify_weights", method) if method == "reload_weights" else (method,)
    ):  # all workers can, before one begins
        answer = await mesh.operate(CallWorkers(step, arguments, **limit))
        if answer.error:
            raise ValueError(answer.error)
    return [msgspec.json.decode(result) for result in answer.results]
