"""Which lives a group is made of, and how its ranks meet.

The scheduler names the processes of the group (Reset.lives) whenever one of them is new. A worker meets the others once in its life:
it loads its weights, then announces itself in a store that belongs to exactly these lives, and when all have done so it commits.
Until then other lives may be offered. Afterwards a group that changes or is disbanded means that this process must end: a peer that
died may have left it waiting inside a collective, from which there is no way out on a GPU. The supervisor starts it again, and the
new lives meet. Torch is imported only where a store is opened.
"""

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Lives = tuple[int, ...]  # incarnations of the group's workers, by rank
POLL_S = 0.01
CONNECT = timedelta(seconds=2)


class Membership:
    """Shared by the event loop, which is told of lives, and the thread that meets them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: Lives | None = None
        self._committed: Lives | None = None

    @property
    def committed(self) -> Lives | None:
        """The lives that this process has met."""
        return self._committed

    def offer(self, lives: Lives) -> bool:
        """The group as it is now. False: this process is committed to other lives and must end."""
        with self._changed:
            if self._committed is not None:
                return self._committed == lives
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
            while self._offered is None:
                self._changed.wait()
            return self._offered

    def still(self, lives: Lives) -> bool:
        """Whether these are on offer; waits a little."""
        with self._changed:
            self._changed.wait_for(lambda: self._offered != lives, POLL_S)
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
        """address: rank 0 listens there, the others connect."""
        self.rank, self._run_dir, self._address = rank, run_dir, address
        self._store: Store | None = None

    def open(self, lives: Lives) -> "Store | None":
        """The store of exactly these lives; None while rank 0 cannot be reached."""
        from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
        from torch.distributed import DistError

        name = "-".join(f"{life:x}" for life in lives)
        if (
            self._address is None
        ):  # a file of its own: a rank that died may have left a line of an older one half written
            return FileStore(f"{self._run_dir}/group-{name}.store")
        if self._store is None:
            host, port = self._address
            try:
                self._store = TCPStore(host, port, None, self.rank == 0, CONNECT, wait_for_workers=False)
            except DistError:
                return None
        return PrefixStore(name, self._store)


def meet(membership: Membership, meeting: Meeting) -> "Store":
    """Wait until all lives of a group have announced themselves and commit to it; their store. Blocks."""
    while True:
        lives = membership.wait()
        store = meeting.open(lives)
        if store is None:
            continue
        store.set(f"here-{meeting.rank}", "")
        everyone = [f"here-{other}" for other in range(len(lives))]
        while membership.still(lives):
            if store.check(everyone) and membership.commit(lives):
                return store
