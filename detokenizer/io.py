"""The detokenizer's links and threads."""

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from msgspec import Struct

from meshlm.detokenizer import tokenizer_files
from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event, PeerLost, PeerUp, Received, Tick
from meshlm.detokenizer.tokenizer_files import LoadedTokenizer
from meshlm.protocol.admit_edge import Admit, Refused
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import ErrorKind, Identity, Incarnation
from meshlm.protocol.text_edge import Prompt
from meshlm.runtime.errors import LinkDown, LinkFull, ProcessFatal, RequestError
from meshlm.runtime.mesh import Mesh

ENCODE_THREADS = 2
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


class DetokenizerApp:
    """See `meshlm.runtime.process.App`."""

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        self._core: Detokenizer | None = None
        self._encoder: Encoder | None = None
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, "encode")
        self._early: list[Event] = []  # what peers said before start() ran

    async def start(self, mesh: Mesh) -> dict[str, str]:
        resolved = mesh.config.resolved
        if resolved is None:
            raise ProcessFatal("mesh.json is not resolved")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._mesh = mesh
        loaded, table = _load(resolved.tokenizer_path)
        try:
            self._encoder = Encoder(loaded, resolved.chat_template)
        except RequestError as error:
            raise ProcessFatal(f"--chat-template: {error.message}") from None
        vocab_size = resolved.spec.vocab_size
        window_s = mesh.config.server.retry_window
        self._core = Detokenizer(table, vocab_size, resolved.max_model_len, window_s, mesh.incarnation)
        for event in self._early:
            self._do(event)
        self._tick()
        self.flush()
        return {"vocabulary": f"{vocab_size} tokens"}

    def _tick(self) -> None:
        assert self._mesh is not None
        self._do(Tick(asyncio.get_running_loop().time()))
        self._mesh.call_later(TICK_S, self._tick)

    def _do(self, event: Event) -> None:
        if self._core is None:
            self._early.append(event)
            return
        for effect in self._core.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        assert self._mesh is not None
        match effect:
            case Encode():
                self._threads.submit(self._encode, effect.job, effect.prompt)
            case _:
                self._send(effect.to, effect.message)

    def _send(self, to: Identity, message: Struct) -> None:
        assert self._mesh is not None
        try:
            self._mesh.send(to, message)
        except LinkDown:
            # Its PeerLost follows, and what must not be lost is sent again when it is back.
            self._mesh.log.debug("not delivered", to=str(to), message=type(message).__name__)
        except LinkFull:
            self._mesh.log.warning("queue full", to=str(to), message=type(message).__name__)
            if isinstance(message, Admit):
                refused = Refused(
                    message.work.handle, ErrorKind.OVERLOADED, "the coordinator's queue is full; try again"
                )
                self._do(Received(to, self._mesh.incarnation_of(to), refused))

    def _encode(self, job: int, prompt: Prompt) -> None:
        """In a thread."""
        assert self._encoder is not None
        assert self._mesh is not None
        try:
            event = Encoded(job, self._encoder.encode(prompt))
        except RequestError as error:
            event = Encoded(job, error=error)
        except Exception as error:
            event = Encoded(
                job, error=RequestError(ErrorKind.INVALID, f"the prompt cannot be encoded: {error}", "prompt")
            )
        self._mesh.call_soon_threadsafe(self._do, event)

    def on_message(self, peer: Identity, message: Struct) -> None:
        life = self._mesh.incarnation_of(peer) if self._mesh is not None else Incarnation(0)
        self._do(Received(peer, life, message))

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self._do(PeerUp(peer, incarnation))

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self._do(PeerLost(peer, incarnation))

    def flush(self) -> None:
        if self._core is not None:
            for send in self._core.batches():
                self._send(send.to, send.message)

    def beat(self) -> tuple[int, str]:
        core = self._core
        return (core.num_tokens, f"{len(core.by_id)} requests") if core else (0, "starting")

    async def drain(self, limit_s: float) -> None:
        """Frontends end first and wait for their requests; nothing is left then."""

    async def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
