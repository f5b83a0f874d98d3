"""What a grammar's request is told when there is no process that could do its work. Imported before a worker has numpy."""

from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.wire.ids import ErrorKind

TOO_LATE = RowFailed("its masks could not be made anew in time; the host is busy; try again", ErrorKind.OVERLOADED)


class MatchersLost(Exception):
    """There is no process of the matchers, or it ended; the text says why. `by_grammar`: because of what it had to do."""

    def __init__(self, message: str, *, by_grammar: bool) -> None:
        super().__init__(message)
        self.message, self.by_grammar = message, by_grammar

    @property
    def failed(self) -> RowFailed:
        """What ends a request for it: what is not the grammar's doing may go well another time."""
        if self.by_grammar:
            return RowFailed(self.message)
        return RowFailed(f"{self.message}; try again", ErrorKind.OVERLOADED)
