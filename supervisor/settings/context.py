"""--max-model-len auto: a mesh whose KV cache has no room for the model's context starts again with the one that fits.

Only a worker knows, when it has its weights. Called by serve.py, run_batch.py and llm.py.
"""

from collections.abc import Callable
from typing import TypeVar

from meshlm.runtime.process import streams
from meshlm.supervisor.errors import ContextDoesNotFit

T = TypeVar("T")


def fitting(start: Callable[[int | None], T]) -> T:
    """What start(tokens of context at most; None: the model's) gives, once it fits. Errors as of `start`."""
    at_most: int | None = None
    while True:
        try:
            return start(at_most)
        except ContextDoesNotFit as error:
            if at_most is not None and error.fits >= at_most:
                raise
            at_most = error.fits
            streams.complain(f"meshlm: --max-model-len auto: {at_most} tokens fit; starting again with that", "warning")
