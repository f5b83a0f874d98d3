"""The process in which a worker's matchers are: a child of the sandbox, which may die of a grammar, and the worker does not.

The stepper asks for masks and finds them in memory that both share; a thread of grammars has new ones compiled over a socket of its
own, while masks are made. The vocabulary is loaded in the fork server, so the worker's interpreter never waits for it, and a child that
died has a successor within milliseconds.
"""

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.config import Resolved
from meshlm.runtime.sandbox.limits import MIB, ChildDied, Limit, Limits
from meshlm.runtime.sandbox.sandbox import Child, NoChild, Sandbox, SandboxFailed
from meshlm.workers.output.grammars import MatchersLost
from meshlm.workers.output.matchers import Turn, Turned
from meshlm.workers.rows.changes import I32

# Ten times what a grammar had to compile in before it came here (detokenizer/grammar_threads.py).
STACK_BYTES = 64 * MIB
LIMITS = Limits(memory_bytes=6144 * MIB, stack_bytes=STACK_BYTES)
SHARED_BYTES = 32 * MIB  # of masks at a time
MOST_CPU_S = 5.0  # of all threads, for the masks of one step
COMPILE_CPU_S = 60.0  # likewise while one grammar is compiled, which the detokenizer has seen to take 2 s at most, beside others' masks
MOST_WALL_S = 120.0
TRIES = 3  # of a grammar that another thing's end took with it
LOOK_S = 0.1  # between two looks at the clock of a child that takes long
# For so long either side looks for what comes next before it sleeps, for to be woken may take as long as the masks themselves. Where
# there are few cores, others have work for them.
SPIN_CORES = 8
SPIN_S = 0.002 if len(os.sched_getaffinity(0)) >= SPIN_CORES else 0.0
LENGTH = struct.Struct("<I")
PIECE = 1 << 16  # what most messages are within


class MaskChild(Struct, frozen=True):
    """The model that the fork server loads: the argument of mask_child.py."""

    tokenizer_path: str
    vocab_size: int
    eos: tuple[int, ...]


class _Session:
    def __init__(self, sandbox: Sandbox) -> None:
        with contextlib.ExitStack() as closing:
            memory = os.memfd_create("masks")
            closing.callback(os.close, memory)
            os.ftruncate(memory, SHARED_BYTES)
            self.map = mmap.mmap(memory, SHARED_BYTES)
            self.compiles, theirs = socket.socketpair()
            closing.callback(theirs.close)
            self.child: Child = sandbox.open(LIMITS, (memory, theirs.fileno()))
        self.words = np.frombuffer(self.map, np.int32)

    def ask(self, connected: socket.socket, message: bytes, most_cpu_s: float) -> bytes:
        """The answer. ChildDied."""
        before, until = self.child.cpu_s(), time.monotonic() + MOST_WALL_S
        try:
            send(connected, message)
            spin_s = SPIN_S if connected is self.child.socket else 0.0  # a grammar's compiling takes longer
            while not comes(connected, LOOK_S, spin_s):
                if self.child.cpu_s() - before > most_cpu_s:
                    raise ChildDied(Limit.CPU, f"it takes more than {most_cpu_s:g} s of CPU time")
                if time.monotonic() > until:
                    raise ChildDied(Limit.WALL, f"it was not done within {MOST_WALL_S:g} s; the host is busy")
            if (answer := receive(connected)) is not None:
                return answer
        except ConnectionError:
            pass
        raise self.child.died()

    def __del__(self) -> None:
        """No thread has it any more. What it could not have at its beginning it lacks."""
        for name in ("compiles", "child"):
            if (held := getattr(self, name, None)) is not None:
                held.close()


class MaskProcess:
    """See the module docstring; what `Grammars` needs of matchers."""

    def __init__(self, resolved: Resolved) -> None:
        eos = tuple(resolved.eos_token_ids)
        argument = MaskChild(resolved.tokenizer_path, resolved.spec.vocab_size, eos)
        self._sandbox = Sandbox("meshlm.workers.output.mask_child", msgspec.msgpack.encode(argument), "masks")
        self.num_words = -(-resolved.spec.vocab_size // 32)
        self._most_lines = SHARED_BYTES // (4 * self.num_words)  # at a time
        self._opening, self._compiling = threading.Lock(), threading.Lock()
        self._session: _Session | None = None

    def start(self) -> None:
        self._sandbox.start()

    def compile(self, text: str) -> str:
        """See `Grammars.compile`. Waits while the vocabulary is loaded."""
        with self._compiling:
            for _ in range(TRIES):
                try:
                    session = self._opened()
                except SandboxFailed as failed:
                    raise MatchersLost(f"it cannot be compiled now: {failed}", by_grammar=False) from None
                if not text:
                    return ""
                try:
                    return session.ask(session.compiles, text.encode("utf-8", "surrogatepass"), COMPILE_CPU_S).decode()
                except ChildDied as died:
                    self._drop(session)
                    if died.is_of_the_job:
                        return died.message
                    why = died.message
            raise MatchersLost(why, by_grammar=False)

    def turn(self, turn: Turn, words: I32) -> Turned:
        ends, turned, begin = np.cumsum([0, *turn.num_lines]), Turned(), 0
        while begin < len(turn.wanted):
            end = int(np.searchsorted(ends, ends[begin] + self._most_lines, "right")) - 1  # as many rows as fit
            end = max(end, begin + 1)
            some = replace(turn, wanted=turn.wanted[begin:end])
            if begin:
                some = replace(some, begins=[], pushed=[], removed=[])
            found = self._asked(some, words[ends[begin] : ends[end]])
            turned = Turned(turned.errors | found.errors, turned.over + found.over, turned.behind | found.behind)
            begin = end
        return turned

    def _asked(self, turn: Turn, words: I32) -> Turned:
        session = None
        try:
            session = self._opened()
            turned = msgspec.msgpack.decode(
                session.ask(session.child.socket, msgspec.msgpack.encode(turn), MOST_CPU_S), type=Turned
            )
        except SandboxFailed as failed:
            raise MatchersLost(f"there is no process for its masks: {failed}", by_grammar=False) from None
        except ChildDied as died:
            if session is not None:
                self._drop(session)
            raise MatchersLost(f"its masks cannot be made: {died.message}", by_grammar=died.is_of_the_job) from None
        words[:] = session.words[: words.size].reshape(words.shape)
        return turned

    def _opened(self) -> _Session:
        """The child that lives, or a new one. SandboxFailed."""
        with self._opening:
            if self._session is None:
                try:
                    self._session = _Session(self._sandbox)
                except OSError as error:  # of the memory that they share
                    raise NoChild(f"no process could be started for it: {error}") from None
            return self._session

    def _drop(self, session: _Session) -> None:
        """It ends; another thread that waits for it sees that."""
        session.child.kill()
        with self._opening:
            if self._session is session:
                self._session = None

    def close(self) -> None:
        with self._opening:
            self._session = None
        self._sandbox.close()


def send(connected: socket.socket, message: bytes) -> None:
    connected.sendall(LENGTH.pack(len(message)) + message)


def comes(connected: socket.socket, within_s: float | None, spin_s: float) -> bool:
    """Whether something does in time, or the end. None: waits for as long as it takes. spin_s: looks so long before it sleeps."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    until = time.monotonic() + spin_s
    while time.monotonic() < until:
        if poll.poll(0):
            return True
        os.sched_yield()  # whoever has work for this core goes first, what is waited for among them
    return bool(poll.poll(None if within_s is None else within_s * 1000))


def receive(connected: socket.socket) -> bytes | None:
    """One message, behind which nothing is sent before it is answered; None at the end."""
    data = bytearray()
    while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
        if not (piece := connected.recv(PIECE)):
            return None
        data += piece
    return bytes(data[LENGTH.size :])
