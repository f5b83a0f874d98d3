"""Errors that end a command with a message for its user."""

import contextlib
from collections.abc import Iterator


class UsageError(Exception):
    """The command line or a file it names is wrong; the text is one line for the user. Exit code 2."""


class StartError(Exception):
    """The mesh could not start or go on; the text is the failing process's own. Exit code 1."""


class StillRuns(StartError):
    """A mesh whose supervisor died is in that run directory, and is not this command's to take over."""


class ContextDoesNotFit(StartError):
    """It could not start with --max-model-len auto, but could with a context of `fits` tokens."""

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


def reason(error: Exception) -> str:
    """What went wrong, in the operating system's words where they are its."""
    return str(getattr(error, "strerror", None) or error)


@contextlib.contextmanager
def raised_as(kind: type[Exception], *errors: type[Exception], of: str = "") -> Iterator[None]:
    """These errors become one of `kind`, with the same text, or with what they are of and their reason."""
    try:
        yield
    except errors as error:
        raise kind(f"{of}: {reason(error)}" if of else str(error)) from None
