"""What the detokenizer's app needs of its mesh, without links and processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from meshlm.protocol.config import ModelConfig, RunConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process.timeline import Timeline

LIFE = Incarnation(1)


class StubMesh:
    """Whose `send` is the test's. `logged`: what was logged with what was raised."""

    def __init__(self, tokenizer: Path, flush: Callable[[], None]) -> None:
        self.timeline = Timeline(Identity(Role.DETOKENIZER, 0))
        spec = SimpleNamespace(vocab_size=49152, type_vocab_size=0, audio_encoder=None)
        resolved = SimpleNamespace(
            device="cpu", tokenizer_path=str(tokenizer), chat_templates={}, spec=spec, max_model_len=1000, pooling=None
        )
        resolved.eos_token_ids = (2,)
        server = SimpleNamespace(retry_window=60.0)
        settled = {"resolved": resolved, "require_resolved": lambda: resolved}
        self.config = SimpleNamespace(**settled, server=server, run=RunConfig(), model=ModelConfig())
        self.incarnation = LIFE
        self.logged: list[str] = []
        self.log = SimpleNamespace(exception=self.logged.append)
        self._flush, self._loop = flush, asyncio.get_running_loop()

    def in_hand_of(self, peer: Identity, incarnation: Incarnation) -> tuple[str, ...]:
        return ()

    def incarnation_of(self, peer: Identity) -> Incarnation:
        return LIFE

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Nothing here takes a second."""

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            callback(*arguments)
            self._flush()

        self._loop.call_soon_threadsafe(run)
