"""Puts an engine to sleep and wakes it up: its weights and KV cache without the device's memory (--enable-sleep-mode).

Owned by the engine; called by the stepper thread between two sessions, by all workers of a group in the same one.
"""

from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from meshlm.protocol.sleeping import TAGS, WEIGHTS
from meshlm.workers.released import Released
from meshlm.workers.weights.model_tensors import tensors_of

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine

_log = structlog.get_logger()


class Sleeper:
    """`without`: what sleeps now."""

    def __init__(self, engine: "ModelEngine") -> None:
        self._engine = engine
        self._released: dict[str, Released] = {}

    def be_without(self, tags: tuple[str, ...]) -> None:
        """The memory of these tags is given back, that of all others is there. CUDA graphs are captured anew once all is.
        torch.OutOfMemoryError where others have taken the memory meanwhile."""
        engine, before = self._engine, set(self._released)
        if before == set(tags):
            return
        cuda = engine.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(engine.device)
        if not before:
            engine.graphs.forget()  # they hold addresses
        with torch.inference_mode():
            for tag in TAGS:
                if tag in before and tag not in tags:
                    self._released.pop(tag).restore()
                elif tag in tags and tag not in before:
                    self._released[tag] = Released(self._tensors(tag), keep=tag == WEIGHTS)
        if cuda:
            torch.cuda.empty_cache()
        freed = {tag: f"{one.num_bytes / 2**30:.2f} GiB" for tag, one in self._released.items()}
        _log.info("asleep" if freed else "awake", **freed)
        if not self._released:
            engine.capture_again()

    def _tensors(self, tag: str) -> list[Tensor]:
        if tag == WEIGHTS:
            return tensors_of(self._engine.model)
        return [tensor for cache in self._engine.compute.caches for tensor in cache.tensors()]
