"""The encoder as a stage of its own in a worker: items go through it, equal shapes at once, behind a cache of their vectors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.media import CACHED_STEPS, MediaItem
from meshlm.workers.media.encoder import MediaEncoder
from meshlm.workers.media.tensors import MediaError, read_tensors, same_shape
from meshlm.workers.media.vectors import VectorCache

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


class EncoderStage:
    """Used by the thread that steps."""

    def __init__(self, encoder: MediaEncoder, max_vectors: int, *, one_by_one: bool = False) -> None:
        """max_vectors: of a step, at most, and what is encoded at once. one_by_one: what an item gets must not depend on others."""
        self.encoder, self._max_vectors, self._one_by_one = encoder, max_vectors, one_by_one
        line = encoder.width * encoder.dtype.itemsize
        self.cache = VectorCache(CACHED_STEPS * max_vectors * line)
        self.num_encoded = 0  # items
        self._reserved: Tensor | None = None

    def reserve(self) -> None:
        """Takes the memory that the cache may have, until the first item comes: the profile of memory counts it as taken."""
        self._reserved = torch.empty(self.cache.max_bytes, dtype=torch.uint8, device=self.encoder.device)

    def load(self, resolved: Resolved) -> None:
        """Other weights. ProcessFatal."""
        self.cache.clear()
        self.encoder.load(resolved)

    def weights(self) -> list[Tensor]:
        """The encoder's tensors."""
        return [*self.encoder.module.parameters(), *self.encoder.module.buffers()]

    def vectors(self, items: Sequence[MediaItem]) -> list[Tensor | MediaError]:
        """[vectors, width] of each on the device, or why there are none."""
        self._reserved = None
        found: dict[bytes, Tensor | MediaError] = {}
        waiting: dict[tuple[object, ...], list[tuple[MediaItem, dict[str, Tensor]]]] = {}
        for item in items:
            if (vectors := self.cache.get(item.digest)) is not None:
                found[item.digest] = vectors
                continue
            try:
                if item.modality not in self.encoder.spec.modalities:
                    raise MediaError(f"{self.encoder.spec.architecture} takes no {item.modality}")
                tensors = self.encoder.arguments(item.modality, read_tensors(item))
            except MediaError as error:
                found[item.digest] = error
            else:
                waiting.setdefault((item.modality, item.num_vectors, *same_shape(tensors)), []).append((item, tensors))
        for group in waiting.values():
            at_once = 1 if self._one_by_one else max(1, self._max_vectors // max(1, group[0][0].num_vectors))
            for begin in range(0, len(group), at_once):
                self._encode(group[begin : begin + at_once], found)
        return [found[item.digest] for item in items]

    def _encode(
        self, group: list[tuple[MediaItem, dict[str, Tensor]]], found: dict[bytes, Tensor | MediaError]
    ) -> None:
        """An item that cannot be encoded takes no other with it."""
        try:
            made = self.encoder.encode(group[0][0].modality, [tensors for _, tensors in group], group[0][0].num_vectors)
        except MediaError as error:
            if len(group) == 1:
                found[group[0][0].digest] = error
            else:
                for one in group:
                    self._encode([one], found)
            return
        self.num_encoded += len(group)
        for (item, _), vectors in zip(group, made, strict=True):
            own = vectors.clone() if len(group) > 1 else vectors  # a part would keep the whole
            found[item.digest] = own
            self.cache.put(item.digest, own)


def stage_of(engine: "ModelEngine") -> EncoderStage | None:
    """That of a worker which embeds a model's tokens; None: another worker does it. ProcessFatal."""
    if not engine.shard.is_first:
        return None
    resolved, exact = engine.resolved, engine.config.worker.deterministic
    encoder = MediaEncoder(resolved, engine.dtype, engine.device, engine.config.model.seed or 0)
    return EncoderStage(encoder, resolved.max_num_batched_tokens, one_by_one=exact)
