"""The deaths that this supervisor knows of, here and on other nodes: those that come later are to hear of them. Owned by io.py."""

from collections import deque
from collections.abc import Iterable

from meshlm.protocol.edges.control import Died
from meshlm.protocol.wire.ids import Identity, Role

MAX_IN_HAND = 64


class KnownDeaths:
    """The last death of each process, told to whoever is there and to whoever comes later."""

    def __init__(self) -> None:
        self._last: dict[Identity, Died] = {}  # the last incarnation that ended, of each that has had one
        self._in_hand: deque[Died] = deque(maxlen=MAX_IN_HAND)  # deaths of frontends, for those that follow them

    def learn(self, died: Died) -> bool:
        """Keep it. False: a later one is known, of which another node has not heard yet."""
        if self._last.setdefault(died.identity, died).incarnation > died.incarnation:
            return False
        self._last[died.identity] = died
        if died.identity.role is Role.FRONTEND and died.in_hand:
            self._in_hand.append(died)
        return True

    def last(self) -> Iterable[Died]:
        return self._last.values()

    def for_newcomers(self) -> tuple[Died, ...]:
        """What a process that has just begun is told, which may have met those that died."""
        return (*self._in_hand, *self._last.values())
