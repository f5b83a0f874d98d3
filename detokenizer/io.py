"""The detokenizer's links and threads."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import msgspec
from msgspec import Struct

from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event
from meshlm.detokenizer.extras import prepare
from meshlm.detokenizer.grammar_threads import GrammarSandbox, GrammarThreads, nobody_waits
from meshlm.detokenizer.questions import QuestionThread
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.counts import Counted, ProcessCounts
from meshlm.protocol.edges import text as edge
from meshlm.protocol.edges.admit import Admit, Refused
from meshlm.protocol.edges.media import MediaGone
from meshlm.protocol.edges.text import MediaPrompt, Submit, TextDeltas, TokenPrompt, num_bytes_of
from meshlm.protocol.edges.token import HANDLED, TokenDeltas
from meshlm.protocol.extras import find_extra, num_bytes
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Identity, Incarnation
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong, ProcessFatal, RequestError
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer
from meshlm.runtime.process import in_hand
from meshlm.runtime.process.deaths import allowed
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Tick
from meshlm.runtime.process.process import App
from meshlm.runtime.process.readable import about

MOST_ENCODE_THREADS = 8  # and half the cores: others have work too
LARGE_BYTES = 256 << 10  # longer prompts have their own threads: a megabyte takes seconds, and 100 times its memory
MAX_WAITING_BYTES = 64 << 20  # of prompts that are not encoded, beyond which new ones get 503
BUNCH = 4  # prompts that a thread encodes before it hands them over: more wait for each other, fewer wake the loop more often
ADMIT_FOR_S = 0.005  # in one turn of the loop: a prompt may have a hundred choices, and others' tokens come between
TICK_S = 1.0


@cache
def _load(path: str) -> tuple[LoadedTokenizer, TokenTable]:
    loaded = tokenizer_files.load(Path(path))
    return loaded, TokenTable(loaded)


def load_ahead(config: MeshConfig) -> None:
    """The vocabulary, which takes longest. What is wrong with it start() says."""
    if config.resolved is not None:
        with contextlib.suppress(ProcessFatal):
            _load(config.resolved.tokenizer_path)


def encoder_of(config: MeshConfig) -> tuple[Encoder, TokenTable]:
    """What turns prompts into tokens, and the vocabulary. ProcessFatal for one, or a chat template, that cannot be used."""
    resolved = config.require_resolved()
    loaded, table = _load(resolved.tokenizer_path)
    pooling = resolved.pooling
    try:
        encoder = Encoder(
            loaded,
            resolved.chat_templates,
            config.model.chat_template_content_format,
            lower_case=pooling is not None and pooling.lower_case,
            types=resolved.spec.type_vocab_size > 1,
        )
    except RequestError as error:
        raise ProcessFatal(f"--chat-template: {error.message}") from None
    return encoder, table


def _is_quick(encode: Encode) -> bool:
    """Whether it takes so little time that the loop may do it: token ids, and nothing to be made of texts."""
    is_ids = isinstance(encode.prompt.prompt if isinstance(encode.prompt, MediaPrompt) else encode.prompt, TokenPrompt)
    return is_ids and not encode.suspect and not encode.bad_words and find_extra(encode.extras, Grammar) is None


class DetokenizerApp(App):
    """A detokenizer as a process: frontends end first and wait for their requests, so it has nothing left to drain."""

    _mesh: Mesh  # from start() on, as the three below
    _encoder: Encoder
    _grammars: GrammarThreads
    _sandbox: GrammarSandbox

    def __init__(self) -> None:
        self._core: Detokenizer | None = None  # the last of them
        self._num_threads = min(MOST_ENCODE_THREADS, max(2, len(os.sched_getaffinity(0)) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, "encode")
        self._large_threads = ThreadPoolExecutor(max(1, self._num_threads // 4), "encode-large")
        self._suspect_thread = ThreadPoolExecutor(1, "encode-suspect")
        self._questions = QuestionThread(self._send, self._log_failure)
        self._waiting: dict[int, int] = {}  # by job: bytes of a prompt that is not encoded yet
        self._waiting_bytes = 0
        self._to_encode: deque[Encode] = deque()
        self._to_admit: deque[Encoded] = deque()
        self._flushes_again = False
        self._told = ProcessCounts()  # to the coordinator
        self._num_new = 0  # of those, since the threads were called last
        self._early: list[Event] = []  # what peers said before start() ran

    async def start(self, mesh: Mesh) -> dict[str, str]:
        resolved = mesh.config.resolved
        if resolved is None:
            raise ProcessFatal("the configuration is not resolved")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._mesh = mesh
        self._encoder, table = encoder_of(mesh.config)
        self._sandbox = GrammarSandbox(resolved, self._log_failure)
        self._grammars = GrammarThreads(self._sandbox.translate, self._sandbox.num_threads)
        if resolved.device == "cuda" and resolved.pooling is None and resolved.eos_token_ids:
            self._sandbox.start()  # a GPU's mesh has the memory, and the time
        vocab_size = resolved.spec.vocab_size
        window_s = mesh.config.server.retry_window
        samples = 0 if resolved.spec.audio_encoder is None else resolved.spec.audio_encoder.num_samples
        longest, life = resolved.max_model_len, mesh.incarnation
        self._core = Detokenizer(table, vocab_size, longest, window_s, life, samples)
        self._core.attempts.max_deaths = allowed(mesh.config.run.max_restarts)
        for event in self._early:
            self._do(event)
        self._questions.begin(self._encoder, self._core, mesh.call_soon_threadsafe)
        self._tick()
        self.flush()
        return {"vocabulary": f"{vocab_size} tokens"}

    def _tick(self) -> None:
        self._mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        self._do(Tick(time.time()))
        if self._core is not None and (told := self._core.counts.told()) != self._told:
            self._told = told
            self._send(COORDINATOR, Counted(told))

    def _do(self, event: Event) -> None:
        if self._core is None:
            self._early.append(event)
            return
        for effect in self._core.handle(event, asyncio.get_running_loop().time()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Encode() if _is_quick(effect):
                event = self._encode(effect)
                self._do(event)
                if self._core is not None and event.job in self._core.jobs:  # more of its choices wait
                    self._encoded([event])
            case Encode():
                self._encode_later(effect)
            case _:
                self._send(effect.to, effect.message)

    def _encode_later(self, encode: Encode) -> None:
        size = num_bytes_of(encode.prompt) + num_bytes(encode.extras)
        if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
            error = RequestError(ErrorKind.OVERLOADED, "too many prompts wait to be tokenized; try again")
            self._do(Encoded(encode.job, error=error))
            return
        self._waiting[encode.job] = size
        self._waiting_bytes += size
        if (grammar := find_extra(encode.extras, Grammar)) is None:
            self._encode_soon(encode)
            return
        try:
            known: Grammar | RequestError | None = self._grammars.known(grammar)
        except RequestError as error:
            known = error
        if known is not None:
            self._compiled(encode, known)
            return
        assert self._core is not None
        done = partial(self._mesh.call_soon_threadsafe, self._compiled, encode)
        self._grammars.submit(grammar, partial(self._core.is_wanted, encode.job), done)

    def _compiled(self, encode: Encode, found: Grammar | RequestError) -> None:
        if isinstance(found, RequestError):
            self._encoded([Encoded(encode.job, error=found)])
        else:
            others = (extra for extra in encode.extras if not isinstance(extra, Grammar))
            self._encode_soon(msgspec.structs.replace(encode, extras=(*others, found)))

    def _encode_soon(self, encode: Encode) -> None:
        if encode.suspect:
            self._suspect_thread.submit(self._encode_large, encode)
        elif self._waiting.get(encode.job, 0) > LARGE_BYTES:
            self._large_threads.submit(self._encode_large, encode)
        else:
            self._to_encode.append(encode)
            self._num_new += 1

    def _encoded(self, events: list[Encoded]) -> None:
        begin = not self._to_admit
        self._to_admit += events
        if begin:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admits what waits for ADMIT_FOR_S seconds, and the rest in a later turn of the loop."""
        assert self._core is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + ADMIT_FOR_S
        try:
            while self._to_admit:
                event = self._to_admit.popleft()
                self._do(event)
                if event.job in self._core.jobs:  # more of its choices wait
                    self._to_admit.append(event)
                else:
                    self._waiting_bytes -= self._waiting.pop(event.job, 0)
                if loop.time() >= until:
                    break
        finally:
            if self._to_admit:
                self._mesh.call_soon_threadsafe(self._admit_waiting)

    def _send(self, to: Identity, message: Struct) -> None:
        try:
            self._mesh.send(to, message)
        except LinkDown:
            # Its PeerLost follows, and what must not be lost is sent again when it is back.
            self._mesh.log.debug("not delivered", to=str(to), **about(message))
        except MessageTooLong as error:
            assert self._core is not None
            for effect in self._core.too_long(to, message, str(error)):
                self._perform(effect)
        except LinkFull:
            self._mesh.log.warning("queue full", to=str(to), **about(message))
            if isinstance(message, Admit):
                text = "the coordinator's queue is full; try again"
                refused = Refused(message.work.handle, ErrorKind.OVERLOADED, text)
                self._do(Received(to, self._mesh.incarnation_of(to), refused))

    def _encode_waiting(self) -> None:
        while self._to_encode:
            events: list[Encoded] = []
            with contextlib.suppress(IndexError):  # another thread took the last one
                while len(events) < BUNCH:
                    events.append(self._encode(self._to_encode.popleft()))
            self._mesh.call_soon_threadsafe(self._encoded, events)

    def _encode_large(self, encode: Encode) -> None:
        self._mesh.call_soon_threadsafe(self._encoded, [self._encode(encode)])

    def _encode(self, encode: Encode) -> Encoded:
        """Encodes one prompt; called in any thread."""
        begin_ns = time.monotonic_ns()
        encoded = in_hand.holding(encode.name, self._encode_now, encode)
        if self._mesh.timeline.on:
            self._mesh.timeline.note("encode", threading.current_thread().name, begin_ns)
        return encoded

    def _encode_now(self, encode: Encode) -> Encoded:
        assert self._core is not None
        if not self._core.is_wanted(encode.job):
            return Encoded(encode.job, error=nobody_waits())
        try:
            encoding = self._encoder.encode_prompt(encode.prompt, encode.truncation)
            extras = tuple(prepare(extra, encoding) for extra in (*encode.extras, *encoding.media))
            return Encoded(encode.job, encoding.token_ids, self._encoder.bad_words(encode.bad_words), extras)
        except RequestError as error:
            return Encoded(encode.job, error=error)
        except BaseException as error:  # a panic of the tokenizer's is no Exception; the client waits for an answer
            self._log_failure("the tokenizer failed")
            text = f"the prompt cannot be encoded: {error}"
            return Encoded(encode.job, error=RequestError(ErrorKind.INVALID, text, "prompt"))

    def _log_failure(self, what: str) -> None:
        """With what is raised just now, which no client's text alone should have been able to raise."""
        self._mesh.log.exception(what)

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case edge.Tokenize() | edge.Detokenize():
                self._questions.ask(peer, message)
                return
            case MediaGone(digests=digests):
                self._mesh.log.warning("files of images are gone", number=len(digests))
            case edge.Cancel():
                self._questions.cancel(peer, message.handle)
                return
        is_begun, begin_ns = self._core is not None, time.monotonic_ns()
        incarnation = self._mesh.incarnation_of(peer) if is_begun else Incarnation(0)
        name = message.request_ids[0] if isinstance(message, Submit) else ""
        in_hand.holding(name, self._do, Received(peer, incarnation, message))
        if isinstance(message, TokenDeltas) and message.timings_ns and is_begun and self._mesh.timeline.on:
            step, planned_ns, *_ = message.timings_ns
            self._mesh.timeline.note("decode", "loop", begin_ns, flow=planned_ns, facts={"step": step})

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer == COORDINATOR:
            self._told = ProcessCounts()
        self._do(PeerUp(peer, incarnation))

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self._questions.lost(peer)
        named = self._mesh.in_hand_of(peer, incarnation) if self._core is not None else ()
        self._do(PeerLost(peer, incarnation, named))

    def flush(self) -> None:
        # As many threads as have something to do; one that comes too late finds nothing.
        for _ in range(min(self._num_threads, -(-self._num_new // BUNCH))):
            self._threads.submit(self._encode_waiting)
        self._num_new = 0
        if self._core is not None:
            for send in self._core.journal.batches(now_ns := time.monotonic_ns()):
                self._send(send.to, send.message)
                if isinstance(send.message, TextDeltas) and (timings := send.message.timings_ns):
                    self._core.counts.histograms["step_decode_time_seconds"].between(timings[HANDLED], now_ns)
            if self._core.journal.tells_again and not self._flushes_again:
                self._flushes_again = True
                self._mesh.call_soon_threadsafe(self._flush_again)

    def _flush_again(self) -> None:
        """A later turn of the loop, which flushes again, has begun."""
        self._flushes_again = False

    def beat(self) -> tuple[int, str]:
        core = self._core
        return (core.num_tokens, f"{len(core.journal.by_id)} requests") if core else (0, "starting")

    def num_requests(self) -> int:
        return len(self._core.journal.by_id) if self._core is not None else 0

    async def stop(self) -> None:
        self._to_encode.clear()
        self._to_admit.clear()
        self._questions.close()
        for grammars in (self._sandbox, self._grammars) if self._core is not None else ():
            grammars.close()
        for threads in (self._threads, self._large_threads, self._suspect_thread):
            threads.shutdown(wait=False, cancel_futures=True)
