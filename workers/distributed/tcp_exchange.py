"""The agreement of workers on several hosts: over tcp, for holders of the mesh's keys alone (CURVE).

The first worker keeps a socket at the group's address as long as an epoch lasts; each other one has one connection to it, says hello
until it is welcome, and leaves the epoch when the connection breaks, as the experts' own connections end it. A worker that is gone is
noticed by the links of the mesh, too, which abort the exchange. Each exchange has a ZeroMQ context of its own, so the stepper thread
alone uses its sockets.
"""

import contextlib
import struct
import time
from collections.abc import Callable, Iterator

import structlog
import zmq

from meshlm.protocol.config import NetworkConfig
from meshlm.protocol.lockstep import StepAgreement, StepGroup
from meshlm.runtime.mesh import tcp
from meshlm.runtime.mesh.keys import Keys
from meshlm.workers.distributed.lockstep import NUMBERS, StepAborted

POLL_MS = 20  # between two looks whether it is aborted
AGAIN_S = 1.0  # between two hellos
MEET_S = 120.0  # all workers have been asked to come at the same time
EPOCH = struct.Struct("<q")  # before whatever is said; a hello and a welcome are this alone
Numbers = tuple[int, ...]

_log = structlog.get_logger()


class TcpExchange:
    """A `StepExchange`. `member` is the worker's number, 0 for the one that gathers at `address`."""

    folder = ""  # such workers have none in common

    def __init__(
        self, address: tuple[str, int], group: StepGroup, member: int, mesh_keys: Keys, network: NetworkConfig
    ) -> None:
        self.group, self._member = group, member
        self._address, self._public = address, mesh_keys.public
        self._tcp = tcp.Tcp(address[0], mesh_keys, network)
        self._prefix = EPOCH.pack(group.epoch)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes]
        self._doorman: tcp.Doorman | None = None
        self._events: zmq.Socket[bytes] | None = None  # of the connection of one that does not gather
        self._aborted = False
        self._calls: list[Callable[[], None]] = []

    def connect(self) -> None:
        try:
            self._open()
            self._gather() if self._member == 0 else self._reach()
        except zmq.ZMQError as error:
            self.close()
            raise StepAborted(f"the group's sockets failed: {error}") from None

    def _open(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER if self._member else zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if self._member:
            self._socket.setsockopt(zmq.ROUTING_ID, b"%d in %d" % (self._member, self.group.epoch))
            self._tcp.prepare(self._socket)
            self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(tcp.join(*self._address))
            return
        self._doorman = tcp.Doorman(self._context, frozenset({self._public}), _log)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that connects again is the same
        while not self._is_bound():  # the socket of the epoch before may still be closing
            self._check()
            time.sleep(POLL_MS / 1e3)

    def _is_bound(self) -> bool:
        try:
            self._tcp.bind(self._socket, self._address[1])
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    # --- what is said ---

    def _say(self, numbers: Numbers | None, to: bytes | None = None) -> None:
        """A hello or a welcome, or a proposal or an agreement. to: a worker, from the one that gathers."""
        body = self._prefix if numbers is None else self._prefix + NUMBERS.pack(*numbers)
        with contextlib.suppress(zmq.Again):  # a hello, which is said again
            self._socket.send_multipart([body] if to is None else [to, body], zmq.NOBLOCK)

    def _heard(self) -> Iterator[tuple[bytes, Numbers | None]]:
        """Waits for a moment; whatever has come of this epoch, with its sender. StepAborted."""
        self._check()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._doorman is not None:
            self._doorman.register(poller)
        poller.poll(POLL_MS)
        if self._doorman is not None:
            self._doorman.answer_all()
        while self._socket.poll(0):
            *sender, body = self._socket.recv_multipart(zmq.NOBLOCK)
            if body[: EPOCH.size] != self._prefix:
                continue  # of another epoch
            rest = body[EPOCH.size :]
            if not rest or len(rest) == NUMBERS.size:
                yield b"".join(sender), NUMBERS.unpack(rest) if rest else None

    def _gather(self) -> None:
        here: set[bytes] = set()
        while len(here) < self.group.num_workers - 1:
            here.update(sender for sender, _ in self._heard())
        for worker in here:
            self._say(None, worker)

    def _reach(self) -> None:
        end = time.monotonic() + MEET_S
        while (now := time.monotonic()) < end:
            self._say(None)
            while time.monotonic() < now + AGAIN_S:
                if any(numbers is None for _, numbers in self._heard()):
                    self._has_lost_connection()  # attempts of before
                    return
        self.close()
        raise StepAborted("the group's first worker does not answer")

    def _has_lost_connection(self) -> bool:
        """Whether it broke since this was last asked."""
        found = False
        while self._events is not None and self._events.poll(0):
            self._events.recv_multipart()
            found = True
        return found

    # --- a step ---

    def agree(self, proposal: StepAgreement) -> StepAgreement:
        own = tuple(int(number) for number in proposal.columns())
        try:
            if self._member:
                self._say(own)
                return StepAgreement.of([self._answer()])
            proposals: dict[bytes, Numbers] = {}
            while len(proposals) < self.group.num_workers - 1:
                proposals.update({worker: numbers for worker, numbers in self._heard() if numbers is not None})
            agreed = StepAgreement.of([own, *proposals.values()])
            for worker in proposals:
                self._say(tuple(int(number) for number in agreed.columns()), worker)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise StepAborted(f"the group cannot step: {error}") from None
        return agreed

    def _answer(self) -> Numbers:
        while True:
            for _, numbers in self._heard():
                if numbers is not None:
                    return numbers
            if self._has_lost_connection():
                self.close()
                raise StepAborted("the connection to the group's first worker is lost")

    # --- its end ---

    def _check(self) -> None:
        if self._aborted or self._context is None:
            self.close()
            raise StepAborted("the group is made anew")

    def abort(self) -> None:
        self._aborted = True
        for call in self._calls:
            call()

    def when_aborted(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def close(self) -> None:
        self._aborted = True
        context, self._context = self._context, None
        if context is not None:
            if self._events is not None:
                self._socket.disable_monitor()
                self._events.close(0)
            self._socket.close(0)
            if self._doorman is not None:
                self._doorman.close()
            context.term()
