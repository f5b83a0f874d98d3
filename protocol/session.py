"""The rules of one link, without sockets: who may speak, what is lost, what comes twice.

One `Session` per peer, driven by runtime/mesh.py. Both sides say HELLO until they have heard the other; a HELLO or WELCOME of
a newer incarnation ends the session with the older one. Within a pair of incarnations every message is delivered
exactly once and in order: DATA frames carry sequence numbers and cumulative acks, unacknowledged frames are
replayed, duplicates and frames of other lives are dropped.
"""

from collections import deque
from enum import Enum

import msgspec
from msgspec import Struct

from meshlm.protocol.channels import WhenFull
from meshlm.protocol.frames import Header, Kind, pack
from meshlm.protocol.ids import Identity, Incarnation

HELLO_EVERY_S = 0.05
ACK_EVERY = 32  # data frames without an ack of ours going out
ACK_AFTER_S = 0.4  # and at the latest: well before the peer's replay
REPLAY_AFTER_S = 1.0  # without progress of the peer's acks


class SessionState(Enum):
    """CLOSED -hello/welcome-> OPEN -newer hello-> OPEN; OPEN -peer died-> CLOSED; any -digest differs-> REFUSED."""

    CLOSED = "closed"
    OPEN = "open"
    REFUSED = "refused"


class Hello(Struct, frozen=True):
    """The body of HELLO and WELCOME."""

    digest: str
    address: str  # where the sender's inbox is


class SendQueueFull(Exception):
    """The window and the queue behind it are full."""

    def __init__(self, when_full: WhenFull) -> None:
        super().__init__(when_full.value)
        self.when_full = when_full


class Opened(Struct, frozen=True):
    """A session with this life of the peer begins. If `replaced` is set, that earlier life is over."""

    incarnation: Incarnation
    replaced: Incarnation | None
    address: str


class Delivered(Struct, frozen=True):
    """One message, in order, once."""

    body: memoryview


class Refused(Struct, frozen=True):
    """There will be no session; the text says why."""

    reason: str


Outcome = Opened | Delivered | Refused | None

_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Session:
    """`wire` collects the frames to put on the wire, in order; the caller takes them out."""

    def __init__(
        self,
        me: Identity,
        incarnation: Incarnation,
        peer: Identity,
        hello: Hello,
        window: int,
        max_queued: int,
        when_full: WhenFull,
    ) -> None:
        self.me, self.incarnation, self.peer = me, incarnation, peer
        self.state = SessionState.CLOSED
        self.peer_incarnation = Incarnation(0)
        self._over = Incarnation(0)  # the latest life of the peer that is known to have ended
        self.wire: deque[bytes] = deque()
        self._hello_body, self._digest = _encode(hello), hello.digest
        self._window, self._max_queued, self._when_full = window, max_queued, when_full
        self._hello_at = -1e9
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._next_seq = 1
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._queued: deque[bytes] = deque()
        self._received = 0
        self._acked_to_peer = 0
        self._acked_at = now
        self._progress_at = now
        self.wire.clear()

    def send(self, body: bytes, now: float) -> None:
        """Number the message and put it on the wire, or behind the window. SendQueueFull when neither has room."""
        if len(self._unacked) < self._window and not self._queued:
            self._transmit(body, now)
        elif len(self._queued) < self._max_queued:
            self._queued.append(body)
        else:
            raise SendQueueFull(self._when_full)

    def receive(self, header: Header, body: memoryview, now: float) -> Outcome:
        """What a frame of this peer means. Never raises for what the peer sent."""
        if header.kind in (Kind.HELLO, Kind.WELCOME):
            return self._on_hello(header, body, now)
        if header.kind is Kind.REFUSE:
            if header.receiver_incarnation != self.incarnation or header.sender_incarnation < self.peer_incarnation:
                return None  # of, or to, an earlier life
            self.state = SessionState.REFUSED
            return Refused(bytes(body).decode("utf-8", "replace"))
        if (
            self.state is not SessionState.OPEN
            or header.sender_incarnation != self.peer_incarnation
            or header.receiver_incarnation != self.incarnation
        ):
            return None
        self._on_ack(header.ack, now)
        if header.kind is not Kind.DATA or header.seq != self._received + 1:
            return None  # an ack, a duplicate, or a gap that the peer's replay will fill
        self._received += 1
        if self._received - self._acked_to_peer >= ACK_EVERY:
            self._put(Kind.ACK)
        return Delivered(body)

    def tick(self, now: float) -> None:
        """Say hello, acknowledge, replay: whatever is due."""
        if self.state is SessionState.CLOSED and now - self._hello_at >= HELLO_EVERY_S:
            self._hello_at = now
            self._put(Kind.HELLO, self._hello_body)
        elif self.state is SessionState.OPEN:
            if self._received > self._acked_to_peer and now - self._acked_at >= ACK_AFTER_S:
                self._acked_at = now
                self._put(Kind.ACK)
            if self._unacked and now - self._progress_at >= REPLAY_AFTER_S:
                self._progress_at = now
                # It may be a new life of the peer that listens there now, and nobody told us of the old one's end.
                self._put(Kind.HELLO, self._hello_body)
                self.wire.extend(frame for _, frame in self._unacked)

    def close(self, incarnation: Incarnation) -> bool:
        """That life of the peer is over, whatever of it may still arrive. False when the session is not with it."""
        self._over = max(self._over, incarnation)
        if self.state is not SessionState.OPEN or self.peer_incarnation != incarnation:
            return False
        self.state = SessionState.CLOSED
        self._reset(0.0)
        return True

    def _on_hello(self, header: Header, body: memoryview, now: float) -> Outcome:
        life = header.sender_incarnation
        if life < self.peer_incarnation or life <= self._over:
            return None  # a late word of an earlier life
        if header.kind is Kind.WELCOME and header.receiver_incarnation != self.incarnation:
            return None
        try:
            hello = _decode_hello(body)
        except msgspec.MsgspecError as error:
            return Refused(f"{self.peer} sent a bad hello: {error}")
        if hello.digest != self._digest:
            reason = f"protocol {self._digest} of {self.me} is not {hello.digest} of {self.peer}: different versions of meshlm"
            self.wire.append(pack(self._header(Kind.REFUSE, life, 0), reason.encode()))
            self.state = SessionState.REFUSED
            return Refused(reason)
        opened: Outcome = None
        if self.state is not SessionState.OPEN or life != self.peer_incarnation:
            replaced = self.peer_incarnation if self.state is SessionState.OPEN else None
            self._reset(now)
            self.state, self.peer_incarnation = SessionState.OPEN, life
            opened = Opened(life, replaced, hello.address)
        if header.kind is Kind.HELLO:
            self._put(Kind.WELCOME, self._hello_body)
        self._on_ack(header.ack, now)
        return opened

    def _on_ack(self, ack: int, now: float) -> None:
        unacked = self._unacked
        while unacked and unacked[0][0] <= ack:
            unacked.popleft()
            self._progress_at = now
        while self._queued and len(unacked) < self._window:
            self._transmit(self._queued.popleft(), now)

    def _transmit(self, body: bytes, now: float) -> None:
        if not self._unacked:
            self._progress_at = now
        frame = pack(self._header(Kind.DATA, self.peer_incarnation, self._next_seq), body)
        self._unacked.append((self._next_seq, frame))
        self._next_seq += 1
        self._acked_to_peer = self._received
        self.wire.append(frame)

    def _put(self, kind: Kind, body: bytes = b"") -> None:
        self._acked_to_peer = self._received
        self.wire.append(pack(self._header(kind, self.peer_incarnation, 0), body))

    def _header(self, kind: Kind, to_life: Incarnation, seq: int) -> Header:
        return Header(kind, self.me, self.peer, self.incarnation, to_life, seq, self._received)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        numbers = [seq for seq, _ in self._unacked]
        assert numbers == list(range(self._next_seq - len(numbers), self._next_seq)), (
            "unacked frames are not consecutive"
        )
        assert len(numbers) <= self._window, "more in flight than the window"
        assert not self._queued or len(numbers) == self._window, "queued although the window has room"
        assert self._acked_to_peer <= self._received
        assert self.state is SessionState.OPEN or not numbers, "frames in flight without a session"
