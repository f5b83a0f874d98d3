"""Bodies that frontends died with in hand: one that has killed two is refused by those that follow. Pure; owned by io.py."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator

from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.edges.control import Died
from meshlm.protocol.wire.ids import ErrorKind, Identity, Incarnation
from meshlm.runtime.process.deaths import poison

MAX_NAMES = 1024


def name_of(path: str, body: bytes) -> str:
    """What a frontend has in hand while it reads this body: a client whose connection breaks sends the same again."""
    return f"body {hashlib.blake2b(path.encode() + b' ' + body, digest_size=16).hexdigest()}"


class PoisonBodies:
    """The supervisor tells each frontend of these deaths, and again with each new link."""

    def __init__(self) -> None:
        self._known: set[tuple[Identity, Incarnation]] = set()
        self._deaths: OrderedDict[str, Died] = OrderedDict()
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._alone = asyncio.Lock()

    def learn(self, died: Died) -> None:
        """A frontend died, maybe one of whose death this one has heard."""
        if (died.identity, died.incarnation) in self._known or not died.in_hand:
            return
        self._known.add((died.identity, died.incarnation))
        for name in died.in_hand:
            self._counts[name] = self._counts.get(name, 0) + 1
            self._deaths[name] = died
            while len(self._counts) > MAX_NAMES:
                self._deaths.pop(self._counts.popitem(last=False)[0])

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """The turn of this body to be read: one of which a frontend may have died is read beside no other such. HttpError for what two
        died of."""
        if name not in self._counts:
            yield
            return
        if text := poison(self._deaths[name].identity.role, self._counts[name]):
            raise HttpError.of_kind(ErrorKind.POISON, text)
        async with self._alone:
            yield
