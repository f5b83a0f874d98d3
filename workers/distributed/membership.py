"""Which lives a group is made of, and how its ranks meet.

The scheduler names the processes of the group (Reset.lives) whenever one of them is new. A worker meets the others once in its life:
it loads its weights, then announces itself in a store that belongs to exactly these lives, and when all have done so it commits.
Until then other lives may be offered. Afterwards a group that changes or is disbanded means that this process must end: a peer that
died may have left it waiting inside a collective, from which there is no way out on a GPU. The supervisor starts it again, and the
new lives meet. Torch is imported only where a store is opened.
"""

import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from meshlm.runtime.errors import ProcessFatal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Lives = tuple[int, ...]  # incarnations of the group's workers, by rank
POLL_S = 0.01
CONNECT = timedelta(seconds=2)
STUCK_S = 10.0  # a question to a store takes milliseconds, unless its host is gone; TCP would wait for minutes
CONNECTED = timedelta(minutes=5)  # what one rank waits for another's word in the store: they connect at the same time


class Membership:
    """Shared by the event loop, which is told of lives, and the thread that meets them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: Lives | None = None
        self._committed: Lives | None = None
        self._looked: float | None = None  # when the thread that meets the others last looked at what is on offer

    @property
    def committed(self) -> Lives | None:
        """The lives that this process has met."""
        return self._committed

    def offer(self, lives: Lives) -> bool:
        """The group as it is now. False: this process is committed to other lives, or stuck in a store, and must end."""
        with self._changed:
            if self._committed is not None:
                return self._committed == lives
            if self._looked is not None and time.monotonic() - self._looked > STUCK_S:
                return False
            self._offered = lives
            self._changed.notify_all()
            return True

    def withdraw(self) -> bool:
        """The group is no more. False: this process is committed to it and must end."""
        with self._changed:
            self._offered = None
            return self._committed is None

    def wait(self) -> Lives:
        """Until a group is offered."""
        with self._changed:
            self._looked = None  # however long it takes
            while self._offered is None:
                self._changed.wait()
            self._looked = time.monotonic()
            return self._offered

    def still(self, lives: Lives) -> bool:
        """Whether these are on offer; waits a little."""
        with self._changed:
            self._changed.wait_for(lambda: self._offered != lives, POLL_S)
            self._looked = time.monotonic()
            return self._offered == lives

    def commit(self, lives: Lives) -> bool:
        """Belong to these lives from now on. False when others were offered meanwhile."""
        with self._changed:
            if self._offered != lives:
                return False
            self._committed = lives
            return True


class Meeting:
    """Where a group's ranks find each other: a file in the run directory, or, for a group on several hosts, a store at an address.

    Each set of lives has a part of its own, so that nobody finds what earlier ones wrote.
    """

    def __init__(self, rank: int, run_dir: str, address: tuple[str, int] | None = None) -> None:
        """address: rank 0 listens there and nowhere else, the others connect."""
        self.rank, self._run_dir, self._address = rank, run_dir, address
        self._store: Store | None = None
        self._keeper = 0  # the life of rank 0 that keeps it

    def open(self, lives: Lives) -> "Store | None":
        """The store of exactly these lives; None while rank 0 cannot be reached. DistError when it is lost meanwhile."""
        from torch._C._distributed_c10d import FileStore, PrefixStore

        name = "-".join(f"{life:x}" for life in lives)
        if self._address is None:
            # a file of its own: a rank that died may have left a line of an older one half written
            return FileStore(f"{self._run_dir}/group-{name}.store")
        if self._keeper != lives[0]:
            self.forget()
        if self._store is None:
            self._store = _listen(*self._address) if self.rank == 0 else _connect(*self._address)
            self._keeper = lives[0]
        return PrefixStore(name, self._store) if self._store is not None else None

    def forget(self) -> None:
        """The connection to rank 0's store is of no more use. Rank 0's own store is as old as its process."""
        if self.rank:
            self._store = None


def _listen(host: str, port: int) -> "Store":
    """A store that is reached at this address alone: left to itself, torch would listen on all. ProcessFatal when it is taken."""
    from torch._C._distributed_c10d import TCPStore

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier life may linger
            listener.bind(address)
            descriptor = listener.detach()  # the store closes it
    except OSError as error:
        raise ProcessFatal(f"--master-addr {host} --master-port: port {port}: {error.strerror or error}") from None
    store = TCPStore(host, port, None, True, CONNECT, wait_for_workers=False, master_listen_fd=descriptor)
    store.set_timeout(CONNECTED)
    return store


def _connect(host: str, port: int) -> "Store | None":
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
    """Wait until all lives of a group have announced themselves and commit to it; their store. Blocks."""
    from torch.distributed import DistError

    while True:
        lives = membership.wait()
        try:
            store = meeting.open(lives)
            if store is not None and _all_come(store, lives, membership, meeting.rank):
                return store
        except DistError:  # rank 0 ended, or its host cannot be reached
            meeting.forget()
        membership.still(lives)


def _all_come(store: "Store", lives: Lives, membership: Membership, rank: int) -> bool:
    """Committed to these lives. False: others are on offer."""
    store.set(f"here-{rank}", "")
    everyone = [f"here-{other}" for other in range(len(lives))]
    while membership.still(lives):
        if store.check(everyone) and membership.commit(lives):
            return True
    return False
