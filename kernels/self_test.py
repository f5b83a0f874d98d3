"""Self-tests at a start: does a kernel give, on this very device, what it must give?

A self-test is an iterator of results. Workers run those of the kernels that their model uses; a kernel that is wrong, or cannot be
compiled or launched, is not used, and what `why_wrong` gives says why. All kernels are compared here, and nowhere else.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """How far what a kernel gave is from what it must give. A reader is told: "{what} {error} {measure}"."""

    what: str
    error: Tensor | float
    near: float
    measure: str = "of the norm away from plain torch"

    def wrong(self) -> str:
        """Why it is wrong, "" where it is near. Waits for the device."""
        error = float(self.error)
        return "" if error <= self.near else f"{self.what} {error:.3g} {self.measure}"  # NaN is wrong too


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """How far apart they are, in parts of the norm of what is expected."""
    error: Tensor = (found.float() - expected.float()).norm() / expected.float().norm()
    return error


def why_wrong(results: Iterable[Result], *, launched: bool = True) -> str:
    """Why a kernel must not be used, by the first result that is wrong; "" where it may be.

    launched: False where kernels are only compiled (kernels/precompile.py); then all that is read is nonsense, and nothing is compared.
    """
    try:
        with same_numbers(), torch.inference_mode():
            return next((why for result in results if launched and (why := result.wrong())), "")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler or a driver; no kernel is worth the process
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises if the GPU itself has failed
        return in_one_line(error)


def in_one_line(error: Exception) -> str:
    """The text of an error, as a line of the log can hold it."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]


@contextmanager
def same_numbers() -> Iterator[None]:
    """Inside, the same is drawn at each start and on each rank: they must choose the same kernels."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(1)
        yield
