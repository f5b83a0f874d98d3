"""The processes that make a group, and how its ranks meet.

The scheduler names the processes of the group (Reset.incarnations) whenever one of them is new. A worker process meets the others
once: it loads its weights, then announces itself in a store that belongs to exactly these incarnations, and when all have done so it
commits. Until then other incarnations may be offered. Afterwards a group that changes or is disbanded means that this process must
end: a peer that died may have left it waiting inside a collective, from which there is no way out on a GPU. The supervisor starts it
again, and the new incarnations meet. Torch is imported only where a store is opened.
"""

import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from meshlm.runtime.errors import ProcessFatal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Incarnations = tuple[int, ...]  # of the group's workers, by rank
POLL_S = 0.01
CONNECT = timedelta(seconds=2)
STUCK_S = 10.0  # a question to a store takes milliseconds, unless its host is gone; TCP would wait for minutes
CONNECTED = timedelta(minutes=5)  # what one rank waits for another's word in the store: they connect at the same time


class Membership:
    """Shared by the event loop, which is told of incarnations, and the thread that meets them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: Incarnations | None = None
        self._committed: Incarnations | None = None
        self._looked: float | None = None  # when the thread that meets the others last looked at what is on offer

    @property
    def committed(self) -> Incarnations | None:
        return self._committed

    def offer(self, incarnations: Incarnations) -> bool:
        """The group as it is now. False: this process is committed to other incarnations, or stuck in a store, and must end."""
        with self._changed:
            if self._committed is not None:
                return self._committed == incarnations
            if self._looked is not None and time.monotonic() - self._looked > STUCK_S:
                return False
            self._offered = incarnations
            self._changed.notify_all()
            return True

    def withdraw(self) -> bool:
        """The group is no more. False: this process is committed to it and must end."""
        with self._changed:
            self._offered = None
            return self._committed is None

    def wait(self) -> Incarnations:
        with self._changed:
            self._looked = None  # however long it takes
            while self._offered is None:
                self._changed.wait()
            self._looked = time.monotonic()
            return self._offered

    def still(self, incarnations: Incarnations) -> bool:
        """Whether these are on offer; waits a little."""
        with self._changed:
            self._changed.wait_for(lambda: self._offered != incarnations, POLL_S)
            self._looked = time.monotonic()
            return self._offered == incarnations

    def commit(self, incarnations: Incarnations) -> bool:
        """Belong to these incarnations from now on. False when others were offered meanwhile."""
        with self._changed:
            if self._offered != incarnations:
                return False
            self._committed = incarnations
            return True


class Meeting:
    """The place where a group's ranks meet: a file in the run directory, or, for a group on several hosts, a store at an address.

    Each set of incarnations has a part of its own, so that nobody finds what earlier ones wrote."""

    def __init__(self, rank: int, run_dir: str, address: tuple[str, int] | None = None) -> None:
        """address: rank 0 listens there and nowhere else, the others connect."""
        self.rank, self.run_dir, self._address = rank, run_dir, address
        self._store: Store | None = None
        self._keeper = 0  # the incarnation of rank 0 that keeps it

    def open(self, incarnations: Incarnations) -> "Store | None":
        """The store of exactly these incarnations; None while rank 0 cannot be reached. DistError when it is lost meanwhile."""
        from torch._C._distributed_c10d import FileStore, PrefixStore

        name = "-".join(f"{incarnation:x}" for incarnation in incarnations)
        if self._address is None:
            # a file of its own: a rank that died may have left a line of an older one half written
            return FileStore(f"{self.run_dir}/group-{name}.store")
        if self._keeper != incarnations[0]:
            self.forget()
        if self._store is None:
            self._store = listen(*self._address) if self.rank == 0 else reach(*self._address)
            self._keeper = incarnations[0]
        return PrefixStore(name, self._store) if self._store is not None else None

    def forget(self) -> None:
        """The connection to rank 0's store is of no more use. Rank 0's own store is as old as its process."""
        if self.rank:
            self._store = None


class MeetingSpot:
    """A store at an address where workers of several hosts meet, by the interface with this name. The one that keeps it does so as long
    as it lives; the others connect anew each time, to whoever keeps it then."""

    def __init__(self, address: tuple[str, int], interface: str, *, keeps: bool) -> None:
        self.interface, self._address, self._keeps = interface, address, keeps
        self._kept: Store | None = None

    def open(self) -> "Store | None":
        """None while nobody keeps it. ProcessFatal."""
        if not self._keeps:
            return reach(*self._address)
        if self._kept is None:
            self._kept = listen(*self._address)
        return self._kept


def listen(host: str, port: int) -> "Store":
    """A store that is reached at this address alone: left to itself, torch would listen on all. ProcessFatal when it is taken."""
    from torch._C._distributed_c10d import TCPStore

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            # connections of an earlier process may linger
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            descriptor = listener.detach()  # the store closes it
    except OSError as error:
        raise ProcessFatal(f"--master-addr {host} --master-port: port {port}: {error.strerror or error}") from None
    store = TCPStore(host, port, None, True, CONNECT, wait_for_workers=False, master_listen_fd=descriptor)
    store.set_timeout(CONNECTED)
    return store


def reach(host: str, port: int) -> "Store | None":
    """The store that rank 0 keeps; None while there is none."""
    from torch._C._distributed_c10d import TCPStore

    try:
        socket.create_connection((host, port), CONNECT.total_seconds()).close()  # torch would log each attempt
    except OSError:
        return None
    store = TCPStore(host, port, None, False, CONNECT, wait_for_workers=False)
    store.set_timeout(CONNECTED)
    return store


def meet(membership: Membership, meeting: Meeting) -> "Store":
    """Wait until all incarnations of a group have announced themselves and commit to it; their store. Blocks."""
    from torch.distributed import DistError

    while True:
        incarnations = membership.wait()
        try:
            store = meeting.open(incarnations)
            if store is not None and _all_come(store, incarnations, membership, meeting.rank):
                return store
        except DistError:  # rank 0 ended, or its host cannot be reached
            meeting.forget()
        membership.still(incarnations)


def _all_come(store: "Store", incarnations: Incarnations, membership: Membership, rank: int) -> bool:
    """Committed to these incarnations. False: others are on offer."""
    store.set(f"here-{rank}", "")
    everyone = [f"here-{other}" for other in range(len(incarnations))]
    while membership.still(incarnations):
        if store.check(everyone) and membership.commit(incarnations):
            return True
    return False
