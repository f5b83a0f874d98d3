"""Errors that end a command with a message for its user."""


class UsageError(Exception):
    """The command line or a file it names is wrong; the text is one line for the user. Exit code 2."""


class StartError(Exception):
    """The mesh could not start or go on; the text is the failing process's own. Exit code 1."""


class ContextDoesNotFit(StartError):
    """It could not start with --max-model-len auto, but could with a context of `fits` tokens."""

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits
