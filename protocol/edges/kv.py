"""KV pages that move: scheduler <-> store, scheduler <-> scheduler, scheduler <-> worker (docs/moved-kv.md).

A *holder* has pages that others may read: the store (tiers of host memory and disk), another rank's scheduler (its prefix cache), or
a worker's connector (a plug-in, another mesh). All holders answer one question: `FindPages` names keys, `PagesFound` says where their
pages lie and leases them. The asking scheduler has its workers copy them with `MovePages`; data never goes over a link. `EndLease`
ends the lease, and what was copied counts only once `LeaseEnded` says that the lease had held until then: so a holder that died, or
began anew, never gives a wrong page.

A key is the hash chain of a block (scheduler_proc/kv/hashes.py): salts, extras and the tokens before it are in it. A *namespace* says
what a page's bytes mean: model, weights, dtype, layout, shards. Equal key and namespace, equal bytes.
"""

from msgspec import Struct

KEY_BYTES = 32  # of a key: sha256
NAMESPACE_BYTES = 16
LEASE_S = 30.0  # a lease that is not ended or renewed by its holder's links ends by itself
NOT_HERE = -1  # in a column of pages


class Segment(Struct, frozen=True, array_like=True):
    """Bytes of page number p: `length` of them from `offset` + p x `stride` on. A page is its segments, one behind the other."""

    offset: int
    stride: int
    length: int


class PageMemory(Struct, frozen=True, omit_defaults=True):
    """Memory of another process of this host in which one worker's slices of pages lie: a file that can be mapped, at `path`; or, with
    a handle, memory of a GPU, and the file is there as long as its process is."""

    path: str
    num_pages: int
    segments: tuple[Segment, ...]
    handle: bytes = b""  # of CUDA IPC; offsets count from where that memory begins

    @property
    def page_bytes(self) -> int:
        return sum(segment.length for segment in self.segments)


class FindPages(Struct, frozen=True, tag="find_pages", omit_defaults=True):
    """Which of these keys does the holder have? Those that it has are leased to the sender under `number`."""

    number: int  # of the sender's incarnation, never used again; the lease's name
    namespace: bytes
    keys: bytes  # KEY_BYTES each
    widths: bytes  # uint8: pages of each key
    # seconds that computing one key's tokens takes; a tier that is slower need not read it. 0: unknown
    block_s: float = 0.0
    session: int = 0  # to a worker: as in StepPlan
    connector: str = ""  # to a worker: which of its connectors is asked ...
    params: bytes = b""  # ... and kv_transfer_params of the request, JSON


class PagesFound(Struct, frozen=True, tag="pages_found", omit_defaults=True):
    """The answer. A holder without anything of it leases nothing and need not be told EndLease."""

    number: int
    pages: bytes  # int32, one for each page of each key, NOT_HERE for those of keys that are not there; empty: none is
    memory: tuple[PageMemory, ...] = ()  # by worker of the asking rank; none: its own connector reads them
    session: int = 0  # of a worker's answer


class EndLease(Struct, frozen=True, tag="end_lease"):
    """The sender reads none of these pages any more."""

    number: int


class LeaseEnded(Struct, frozen=True, tag="lease_ended"):
    """The answer to EndLease. valid: the lease had held until now, so that what was read is what was leased."""

    number: int
    valid: bool


SchedulerToScheduler = FindPages | PagesFound | EndLease | LeaseEnded


class OpenPages(Struct, frozen=True, tag="open_pages"):
    """A scheduler's workers are ready: their pages have so many bytes, by worker. Its earlier offers and leases are void."""

    namespace: bytes
    page_bytes: tuple[int, ...]


class PagesOpened(Struct, frozen=True, tag="pages_opened", omit_defaults=True):
    """The store's memory, by worker of that rank. failed: why it has none for pages of this size."""

    memory: tuple[PageMemory, ...] = ()
    failed: str = ""


class OfferPages(Struct, frozen=True, tag="offer_pages"):
    """These keys' pages are computed, and may be saved. Those that the store wants are leased to the sender, who writes them."""

    number: int
    namespace: bytes
    keys: bytes
    widths: bytes  # uint8


class PagesWanted(Struct, frozen=True, tag="pages_wanted"):
    """Pages of the store's memory for what was offered, in the order of OfferPages' pages; NOT_HERE: not wanted, or no room. Nobody
    answers PagesStored to an offer of which nothing is wanted."""

    number: int
    pages: bytes  # int32


class PagesStored(Struct, frozen=True, tag="pages_stored"):
    """What the store wanted of this offer is written. Keys that failed are none of its content; the lease ends."""

    number: int
    stored: bytes  # uint8, by key


SchedulerToStore = OpenPages | FindPages | EndLease | OfferPages | PagesStored
StoreToScheduler = PagesOpened | PagesFound | LeaseEnded | PagesWanted


class MovePages(Struct, frozen=True, tag="move_pages", omit_defaults=True):
    """Copy pages between the KV cache and other memory, beside steps: a load behind those that were planned before it.

    The pages here are leased until the answer: no step writes them (loads) or frees them (saves). A worker copies nothing after the
    deadline, nor once its session has ended: before it answers a Reset its copies have stopped."""

    session: int
    number: int
    is_load: bool  # into the KV cache; else out of it
    pages: bytes  # int32: of the KV cache
    there: bytes = b""  # int32: the same pages in `memory`
    memory: PageMemory | None = None  # None: `connector` moves them
    connector: str = ""
    keys: bytes = b""  # KEY_BYTES each, with a connector: of each page's key
    params: bytes = b""  # with a connector, as in FindPages
    deadline_ns: int = 0  # monotonic clock of this host; 0: none


class LeavePages(Struct, frozen=True, tag="leave_pages", omit_defaults=True):
    """Another mesh may read these pages of a prompt by `ticket` (remote_pages.py) until the deadline. They are leased until a second
    later, or PagesTaken."""

    session: int
    number: int
    ticket: bytes
    keys: bytes  # KEY_BYTES each, of each page
    pages: bytes  # int32
    deadline_ns: int  # monotonic clock of this host
    params: bytes = b""  # kv_transfer_params of the request, JSON: whom they are to be sent to, if anybody


class PagesTaken(Struct, frozen=True, tag="pages_taken"):
    """Nobody reads any more from this worker what was left under this number."""

    session: int
    number: int


class PagesMoved(Struct, frozen=True, tag="pages_moved", omit_defaults=True):
    """The answer of one worker."""

    session: int
    number: int
    failed: bytes = b""  # int32: places in MovePages.pages whose content is not to be trusted
    num_bytes: int = 0
    duration_ns: int = 0
    message: str = ""  # why the first of them failed
