"""The errors that cross module borders. Each says how much it ends."""

from meshlm.protocol.wire.ids import ErrorKind, Identity


class ProcessFatal(Exception):
    """Ends this process; the text is one line for the user."""


class ContextTooLong(ProcessFatal):
    """The KV cache has no room for one request of --max-model-len auto, but for one of `fits` tokens."""

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


class ModelFilesError(ProcessFatal):
    """The model cannot be used; one line that names the flag or file."""


class RequestError(Exception):
    """Ends one request. `param` names the field at fault, "" if none."""

    def __init__(self, kind: ErrorKind, message: str, param: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param


class LinkDown(Exception):
    """There is no open session with this peer."""

    def __init__(self, peer: Identity) -> None:
        super().__init__(f"no session with {peer}")
        self.peer = peer


class MessageTooLong(Exception):
    """No frame holds this message, so it was not sent and never will be: the caller ends what it is about, and only that."""

    def __init__(self, peer: Identity, name: str, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes is too long for the mesh ({name} to {peer}; at most {limit})")
        self.peer = peer


class LinkFull(Exception):
    """This peer takes no more messages now; answer the request with 503."""

    def __init__(self, peer: Identity) -> None:
        super().__init__(f"the queue to {peer} is full")
        self.peer = peer
