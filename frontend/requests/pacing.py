"""How fast the prompts of one HTTP request go into the mesh: as its sequences begin, so that thousands of them do not come all at once.

Every process from here to the workers would have them before others' tokens, and no batch takes them faster. Pure; used by
generation.py.
"""

from collections.abc import Sequence

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.client.choice import Choice

MOST_WAITING = 256  # sequences of a request without a first token, for each rank: a batch does not run dry of them


def most_waiting(config: MeshConfig) -> int:
    """The sequences of a request that may be in the mesh without a token."""
    return MOST_WAITING * config.parallel.data_parallel_size


class Pace:
    """The sequences of one request that were asked for and have no token yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[Choice] = []

    def room(self, num: int) -> bool:
        """Whether `num` more may be asked for now. A prompt has all its choices at once, however many they are."""
        if len(self._waiting) + num > self._most:
            self._waiting = [choice for choice in self._waiting if not choice.first_at and choice.finished is None]
        return not self._waiting or len(self._waiting) + num <= self._most

    def asked(self, choices: Sequence[Choice]) -> None:
        """These were asked for."""
        self._waiting += choices
