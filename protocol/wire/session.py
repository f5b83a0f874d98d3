"""The rules of one link, without sockets: who may speak, what is lost, what comes twice.

One `Session` per peer, driven by runtime/mesh/mesh.py. Both sides say HELLO until they have heard the other; a HELLO or WELCOME of
a newer incarnation ends the session with the older one. Within a pair of incarnations every message is delivered
exactly once and in order: DATA frames carry sequence numbers and cumulative acks, unacknowledged frames are
replayed, duplicates and frames of other epochs are dropped.

A peer may be lost that is not dead: its host cannot be reached, or it does not read. Its session ends (`lose`), and the next one
with the same process is a new epoch of the link. A process's *epoch* on a link is its incarnation plus how often it has lost the
peer there; to the rules above that is a newer incarnation, so both sides begin anew.
"""

from collections import deque
from enum import Enum

import msgspec
from msgspec import Struct

from meshlm.protocol.wire.channels import MAX_QUEUED_BYTES, WhenFull
from meshlm.protocol.wire.frames import HEADER_BYTES, Header, Kind, data_frame_prefix, pack, pack_numbers
from meshlm.protocol.wire.ids import Identity, Incarnation

HELLO_EVERY_S = 0.05  # at first; a peer that does not answer is greeted ever less often
MAX_HELLO_EVERY_S = 1.0
HELLO_BACKOFF = 1.2
IMPATIENT_S = 0.2  # with hellos rarer than this nothing depends on the answer coming at once
ACK_EVERY = 32  # data frames without an ack of ours going out
ACK_AFTER_S = 0.4  # and at the latest: well before the peer's replay
REPLAY_AFTER_S = 1.0  # without progress of the peer's acks
MAX_REPLAYS = 5  # that the peer answered without taking a frame: then it never will
BLOCKED_REPLAYS = 2  # and it is said that something is wrong
KEEPALIVES = 6  # acks in the time after which silence means loss, whatever else is sent
RIVAL = "is in this mesh already, on another node"
MAX_QUIET_STEP = 0.1  # of that time counts between two ticks: more means that we slept, not the peer
BAD_BODY = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding a peer's bytes may raise


class SessionState(Enum):
    """CLOSED -hello/welcome-> OPEN -newer hello-> OPEN; OPEN -peer died-> CLOSED; any -digest differs-> REFUSED."""

    CLOSED = "closed"
    OPEN = "open"
    REFUSED = "refused"


class Hello(Struct, frozen=True):
    """The body of HELLO and WELCOME."""

    digest: str
    address: str  # where the sender's inbox is, for peers of its node
    tcp: str = ""  # and for peers of other nodes
    node: str = ""  # peers with the same one share a run directory
    incarnation: Incarnation = Incarnation(0)  # the sender's; 0: the epoch in the header


class SendQueueFull(Exception):
    """The window and the queue behind it are full."""

    def __init__(self, when_full: WhenFull) -> None:
        super().__init__(when_full.value)
        self.when_full = when_full


class Opened(Struct, frozen=True):
    """A session with this incarnation of the peer begins. If `replaced` is set, that earlier incarnation is over."""

    incarnation: Incarnation
    replaced: Incarnation | None
    hello: Hello


class Delivered(Struct, frozen=True):
    """One message, in order, once."""

    body: memoryview


class Ended(Struct, frozen=True):
    """This incarnation of the peer said that it ends; the session is closed."""

    incarnation: Incarnation


class Refused(Struct, frozen=True):
    """There will be no session; the text says why."""

    reason: str


class Rival(Struct, frozen=True):
    """Another node's process claims to be this peer while it is here. `frame` tells it so, at its `hello.tcp`."""

    hello: Hello
    frame: bytes


Outcome = Opened | Delivered | Ended | Refused | Rival | None

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
        silence_s: float = 0.0,
        max_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """Begins a session. With `silence_s` the caller reports frames by `heard`, and the peer is `silent` after so long without."""
        self.me, self.incarnation, self.peer = me, incarnation, peer
        self.state = SessionState.CLOSED
        self.epoch = incarnation
        self.peer_incarnation = Incarnation(0)
        self._peer_epoch = Incarnation(0)
        self._peer_node = ""
        self._over = Incarnation(0)  # the latest incarnation of the peer that is known to have ended
        self.wire: deque[bytes] = deque()
        self.frame_prefix = b""  # how the peer's DATA frames of this session begin; b"" without a session
        self._own_frame_prefix = b""  # and ours
        self._hello_body, self._digest = _encode(hello), hello.digest
        self._window, self._max_queued, self._max_bytes, self._when_full = window, max_queued, max_bytes, when_full
        self._hello_at = -1e9
        self._hello_every_s = HELLO_EVERY_S
        self.silence_s, self._quiet_s = silence_s, 0.0
        self._ticked_at = self._kept_alive_at = 0.0
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._next_seq = 1
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._queued: deque[bytes] = deque()
        self.num_bytes = 0  # of messages that are not acknowledged
        self._received = 0
        self._acked_to_peer = 0
        self._acked_at = now
        self._progress_at = now
        self._num_replays = 0  # that the peer answered, since it took a frame
        self._awaits_answer = False
        # replays of the peer, one after the other, ...
        self._num_stalls, self._stalled_at, self._received_then = 0, -1e9, -1
        self.starved = False  # ... of a frame that never comes
        self.wire.clear()

    def send(self, body: bytes, now: float) -> None:
        """Number the message and put it on the wire, or behind the window. SendQueueFull when neither has room."""
        if self.num_bytes >= self._max_bytes:
            raise SendQueueFull(self._when_full)
        if len(self._unacked) < self._window and not self._queued:
            self._transmit(body, now)
        elif len(self._queued) < self._max_queued:
            self._queued.append(body)
        else:
            raise SendQueueFull(self._when_full)
        self.num_bytes += len(body)

    def receive(self, header: Header, body: memoryview, now: float) -> Outcome:
        """Takes a frame of this peer and says what it means. It never raises for what the peer sent."""
        if header.kind in (Kind.HELLO, Kind.WELCOME):
            return self._on_hello(header, body, now)
        if header.kind is Kind.REFUSE:
            if self.state is SessionState.OPEN or header.receiver_epoch != self.epoch:
                return None  # what a newer incarnation of the peer refuses, its own hello will tell; or to an earlier epoch
            if header.sender_epoch < self._peer_epoch:
                return None
            self.state = SessionState.REFUSED
            return Refused(bytes(body).decode("utf-8", "replace"))
        if (
            self.state is not SessionState.OPEN
            or header.sender_epoch != self._peer_epoch
            or header.receiver_epoch != self.epoch
        ):
            return None
        if header.kind is Kind.DATA:
            return Delivered(body) if self.is_next(now, header.seq, header.ack) else None
        self._on_ack(header.ack, now)
        return self._on_bye() if header.kind is Kind.BYE else None

    def is_next(self, now: float, seq: int, ack: int) -> bool:
        """A DATA frame of this session's `frame_prefix`: whether its message is to be delivered now. Else it is a duplicate, or there
        is a gap that the peer's replay will fill."""
        if self._unacked or self._queued:
            self._on_ack(ack, now)
        if seq != self._received + 1:
            return False
        self._received = seq
        if seq - self._acked_to_peer >= ACK_EVERY:
            self._put(Kind.ACK)
        return True

    def tick(self, now: float) -> None:
        """Say hello, acknowledge, replay: whatever is due."""
        if self.state is SessionState.CLOSED and now - self._hello_at >= self._hello_every_s:
            self._hello_at = now
            self._hello_every_s = min(self._hello_every_s * HELLO_BACKOFF, MAX_HELLO_EVERY_S)
            self._put(Kind.HELLO, self._hello_body)
        elif self.state is SessionState.OPEN:
            if self.silence_s:
                self._listen(now)
            if self._num_stalls:
                self.starved = self._num_stalls >= BLOCKED_REPLAYS and self._received == self._received_then
                self.starved = self.starved and now - self._stalled_at < 2 * REPLAY_AFTER_S
            if self._received > self._acked_to_peer and now - self._acked_at >= ACK_AFTER_S:
                self._acked_at = now
                self._put(Kind.ACK)
            if self._unacked and now - self._progress_at >= REPLAY_AFTER_S:
                self._progress_at = now
                self._awaits_answer = True
                # It may be a new incarnation of the peer that listens there now, and nobody told us of the old one's end.
                self._put(Kind.HELLO, self._hello_body)
                self.wire.extend(frame for _, frame in self._unacked)

    def _listen(self, now: float) -> None:
        """Keep the link from falling silent, and count for how long the peer's side is."""
        self._quiet_s += min(now - self._ticked_at, MAX_QUIET_STEP * self.silence_s)
        self._ticked_at = now
        if now - self._kept_alive_at >= self.silence_s / KEEPALIVES:
            self._kept_alive_at = now
            self._put(Kind.ACK)

    def heard(self) -> None:
        """Something came from the peer."""
        self._quiet_s = 0.0

    @property
    def num_sent(self) -> int:
        """The number of messages that the peer was sent since this session opened."""
        return self._next_seq - 1

    @property
    def is_troubled(self) -> bool:
        """False: it is certainly neither silent nor stuck, blocked or starved."""
        return self._num_replays > 0 or self._num_stalls > 0 or self._quiet_s > 0.0

    @property
    def silent(self) -> bool:
        """Nothing came for too long."""
        return self.silence_s > 0.0 and self.state is SessionState.OPEN and self.silence_s < self._quiet_s

    @property
    def stuck(self) -> bool:
        """The peer lives and hears us, but does not take the next frame, however often it is sent."""
        return self._num_replays >= MAX_REPLAYS

    @property
    def blocked(self) -> bool:
        """It is about to be `stuck`."""
        return self._num_replays >= BLOCKED_REPLAYS

    @property
    def held_up(self) -> memoryview:
        """The message that the peer should take next; empty when there is none."""
        return memoryview(self._unacked[0][1])[HEADER_BYTES:] if self._unacked else memoryview(b"")

    @property
    def impatient(self) -> bool:
        """Whether the session is about to open, as far as one can tell."""
        return self.state is SessionState.CLOSED and self._hello_every_s < IMPATIENT_S

    def bye(self) -> None:
        """This process ends."""
        if self.state is SessionState.OPEN:
            self._put(Kind.BYE)

    def _on_bye(self) -> Ended:
        incarnation = self.peer_incarnation
        self.close(incarnation)
        return Ended(incarnation)

    def lose(self) -> bool:
        """The peer may live, but this session with it is over; greet it anew. False when there is none."""
        if self.state is not SessionState.OPEN:
            return False
        self.epoch = Incarnation(self.epoch + 1)
        self._closed()
        return True

    def _closed(self) -> None:
        self.state = SessionState.CLOSED
        self.frame_prefix = self._own_frame_prefix = b""
        self._hello_every_s = HELLO_EVERY_S
        self._reset(0.0)

    def close(self, incarnation: Incarnation) -> bool:
        """Ends the session: that incarnation of the peer and all before it are over, whatever may still arrive. False: the session is
        not with them."""
        self._over = max(self._over, incarnation)
        if self.state is not SessionState.OPEN or self.peer_incarnation > incarnation:
            return False
        self._closed()
        return True

    def _on_hello(self, header: Header, body: memoryview, now: float) -> Outcome:
        epoch = header.sender_epoch
        if epoch < self._peer_epoch:
            return None  # a late word of an earlier epoch
        if header.kind is Kind.WELCOME and header.receiver_epoch != self.epoch:
            return None
        try:
            hello = _decode_hello(body)
        except BAD_BODY as error:
            return Refused(f"{self.peer} sent a bad hello: {error}")
        incarnation = hello.incarnation or epoch
        if incarnation <= self._over:
            return None
        is_new = self.state is not SessionState.OPEN or epoch != self._peer_epoch
        if is_new and self.state is SessionState.OPEN and hello.node != self._peer_node and not self.silent:
            reason = f"{self.peer} {RIVAL}"
            return Rival(hello, pack(self._header(Kind.REFUSE, epoch, 0), reason.encode()))
        if hello.digest != self._digest:
            return self._refuse(hello, epoch)
        opened = self._open(hello, epoch, incarnation, now) if is_new else None
        if header.kind is Kind.HELLO:
            self._put(Kind.WELCOME, self._hello_body)
            if opened is None and header.receiver_epoch == self.epoch and now - self._stalled_at > REPLAY_AFTER_S / 2:
                self._num_stalls = self._num_stalls + 1 if self._received == self._received_then else 1
                self._stalled_at, self._received_then = now, self._received
        if header.receiver_epoch == self.epoch:  # else it counts what an earlier session brought
            if self._awaits_answer and header.kind is Kind.WELCOME:
                self._num_replays, self._awaits_answer = self._num_replays + 1, False
            self._on_ack(header.ack, now)
        return opened

    def _refuse(self, hello: Hello, epoch: Incarnation) -> Refused:
        reason = (
            f"protocol {self._digest} of {self.me} is not {hello.digest} of {self.peer}: different versions of meshlm"
        )
        self.wire.append(pack(self._header(Kind.REFUSE, epoch, 0), reason.encode()))
        self.state = SessionState.REFUSED
        self.frame_prefix = self._own_frame_prefix = b""
        return Refused(reason)

    def _open(self, hello: Hello, epoch: Incarnation, incarnation: Incarnation, now: float) -> Opened:
        replaced = self.peer_incarnation if self.state is SessionState.OPEN else None
        self._reset(now)
        self.state, self.peer_incarnation, self._peer_epoch = SessionState.OPEN, incarnation, epoch
        self._peer_node, self._hello_every_s = hello.node, HELLO_EVERY_S
        self.frame_prefix = data_frame_prefix(self.peer, epoch, self.me, self.epoch)
        self._own_frame_prefix = data_frame_prefix(self.me, self.epoch, self.peer, epoch)
        self._quiet_s, self._ticked_at = 0.0, now
        return Opened(incarnation, replaced, hello)

    def _on_ack(self, ack: int, now: float) -> None:
        unacked = self._unacked
        while unacked and unacked[0][0] <= ack:
            _, frame = unacked.popleft()
            self.num_bytes -= len(frame) - HEADER_BYTES
            self._progress_at, self._num_replays = now, 0
        while self._queued and len(unacked) < self._window:
            self._transmit(self._queued.popleft(), now)

    def _transmit(self, body: bytes, now: float) -> None:
        if not self._unacked:
            self._progress_at = now
        frame = self._own_frame_prefix + pack_numbers(self._next_seq, self._received) + body
        self._unacked.append((self._next_seq, frame))
        self._next_seq += 1
        self._acked_to_peer = self._received
        self.wire.append(frame)

    def _put(self, kind: Kind, body: bytes = b"") -> None:
        self._acked_to_peer = self._received
        self.wire.append(pack(self._header(kind, self._peer_epoch, 0), body))

    def _header(self, kind: Kind, to_epoch: Incarnation, seq: int) -> Header:
        return Header(kind, self.me, self.peer, self.epoch, to_epoch, seq, self._received)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        numbers = [seq for seq, _ in self._unacked]
        assert numbers == list(range(self._next_seq - len(numbers), self._next_seq)), (
            "unacked frames are not consecutive"
        )
        assert len(numbers) <= self._window, "more in flight than the window"
        held = sum(len(frame) - HEADER_BYTES for _, frame in self._unacked) + sum(map(len, self._queued))
        assert self.num_bytes == held, "bytes are lost"
        assert not self._queued or len(numbers) == self._window, "queued although the window has room"
        assert self._acked_to_peer <= self._received
        assert self.state is SessionState.OPEN or not numbers, "frames in flight without a session"
        assert (self.state is SessionState.OPEN) == bool(self.frame_prefix) == bool(self._own_frame_prefix), (
            "a frame_prefix without a session"
        )
