"""Compiles grammars: in children of this process, in threads that wait for them, and with a cache of those that are known.

Owned by io.py. `known` and `submit` are called in its loop, and `done` of `submit` in a thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from meshlm.detokenizer.grammar_cache import GrammarCache, Translate, Unknown, refused
from meshlm.protocol.config import Resolved
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.sandbox.limits import MIB, ChildDied, Limit, Limits
from meshlm.runtime.sandbox.sandbox import Busy, Lanes, NoChild, Sandbox, SandboxFailed

# A worker's process of masks has more of everything (workers/output/mask_process.py): what compiles here compiles there.
LIMITS = Limits(cpu_s=2.0, memory_bytes=512 * MIB, stack_bytes=4 * MIB, niceness=5)
BUSY = "too many grammars wait to be compiled; try again"
MAX_WAITING = 1024  # grammars; new ones get 503 beyond
Done = Callable[[Grammar | RequestError], None]


class GrammarChild(Struct, frozen=True):
    """What the fork server loads: the argument of grammar_child.py."""

    tokenizer_path: str
    vocab_size: int
    eos: tuple[int, ...]

    @staticmethod
    def argument(resolved: Resolved) -> bytes:
        eos = tuple(resolved.eos_token_ids)
        return msgspec.msgpack.encode(GrammarChild(resolved.tokenizer_path, resolved.spec.vocab_size, eos))


class GrammarSandbox:
    """`translate` for a model, in children of this process."""

    def __init__(self, resolved: Resolved, log_failure: Callable[[str], None]) -> None:
        self._sandbox = Sandbox("meshlm.detokenizer.grammar_child", GrammarChild.argument(resolved), "grammars")
        self._lanes = Lanes(self._sandbox, LIMITS)
        self._log_failure = log_failure
        self.num_threads = self._lanes.num_threads  # that should call `translate`
        self.start = self._sandbox.start  # loads the vocabulary, in another process, before the first grammar comes
        self.close = self._sandbox.close

    def translate(self, grammar: Grammar) -> tuple[str, str]:
        try:
            answer = self._lanes.run(msgspec.msgpack.encode(grammar))
            return msgspec.msgpack.decode(answer, type=tuple[str, str])
        except Busy:
            raise Unknown(ErrorKind.OVERLOADED, BUSY) from None
        except ChildDied as died:
            if died.limit is Limit.CPU:
                raise Unknown(ErrorKind.INVALID, f"{died.message} to compile") from None
            if not died.is_of_the_job:
                raise Unknown(ErrorKind.OVERLOADED, f"{died.message}; try again") from None
            return "", died.message
        except NoChild as failed:
            raise Unknown(ErrorKind.OVERLOADED, f"it cannot be compiled now: {failed}; try again") from None
        except SandboxFailed as failed:
            self._log_failure("the grammar library failed")
            raise Unknown(ErrorKind.INVALID, f"the grammar cannot be compiled: {failed}") from None


class GrammarThreads:
    """The threads and their cache. `translate` may wait, in as many threads."""

    def __init__(self, translate: Translate, num_threads: int) -> None:
        self._cache = GrammarCache(translate)
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._num_waiting = 0  # those that are compiled, too
        self._lock = threading.Lock()

    def known(self, grammar: Grammar) -> Grammar | None:
        """The compiled grammar, if that takes no time. RequestError."""
        return self._cache.known(grammar)

    def submit(self, grammar: Grammar, is_wanted: Callable[[], bool], done: Done) -> None:
        """`done` gets the compiled grammar, or why there is none. is_wanted: somebody still waits for it."""
        with self._lock:
            is_full = self._num_waiting >= MAX_WAITING
            self._num_waiting += not is_full
        if is_full:
            done(refused(grammar, BUSY, ErrorKind.OVERLOADED))
        else:
            self._threads.submit(self._compile, grammar, is_wanted, done)

    def _compile(self, grammar: Grammar, is_wanted: Callable[[], bool], done: Done) -> None:
        try:
            found: Grammar | RequestError = self._cache.compile(grammar) if is_wanted() else nobody_waits()
        except RequestError as error:
            found = error
        except BaseException as error:  # the client waits for an answer
            found = refused(grammar, f"the grammar cannot be compiled: {error}", ErrorKind.INTERNAL)
        with self._lock:
            self._num_waiting -= 1
        done(found)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def nobody_waits() -> RequestError:
    return RequestError(ErrorKind.INVALID, "nobody waits for it")
