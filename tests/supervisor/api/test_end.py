"""Why a mesh has ended, for all who ask it then."""

import asyncio
from typing import Any

from meshlm.supervisor.api.background import end_of
from meshlm.supervisor.errors import ContextDoesNotFit, StartError


class Ended:
    """A supervisor whose mesh has ended."""

    def __init__(self, error: Exception | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def test_each_caller_gets_an_error_of_its_own() -> None:
    """One that is raised again and again would keep what all its callers had."""
    supervisor: Any = Ended(StartError("the worker died"))
    first, second = end_of(supervisor), end_of(supervisor)
    assert str(first) == str(second) == "the worker died"
    assert first is not second
    assert first is not supervisor.ended.exception()


async def test_the_length_that_would_fit_is_told() -> None:
    supervisor: Any = Ended(ContextDoesNotFit("too little", 400))
    found = end_of(supervisor)
    assert isinstance(found, ContextDoesNotFit)
    assert found.fits == 400


async def test_an_end_without_an_error_is_one_for_who_asks_then() -> None:
    supervisor: Any = Ended(None)
    assert str(end_of(supervisor)) == "the mesh has ended"
