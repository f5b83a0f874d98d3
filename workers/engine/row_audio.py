"""The audio of requests that begin in the next step, until the encoder has it. Owned by rows.py, run by the engine.

The audio stays on the host until then. The encoder runs beside the step, before a CUDA graph is replayed: it writes into pages that
the request owns from this step on.
"""

from collections.abc import Sequence

import torch

from meshlm.protocol.audio import Audio
from meshlm.workers.batch import LayerCache
from meshlm.workers.models.decoder import Decoder

SILENCE = Audio(bytes(4))


class RowAudio:
    """See the module docstring."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._new: list[tuple[Audio, Sequence[int]]] = []

    def take(self, audio: Audio | None, pages: Sequence[int]) -> None:
        """A request begins, whose first page in each group is one of `pages`."""
        if audio is not None:
            self._new.append((audio, pages))

    def reset(self) -> None:
        self._new.clear()

    def encode(self, model: Decoder, caches: list[LayerCache]) -> None:
        """Encodes all that came, one after the other."""
        for audio, pages in self._new:
            samples = torch.frombuffer(bytearray(audio.samples), dtype=torch.float32)
            if self._device.type == "cuda":  # the host does not wait for the copy
                samples = samples.pin_memory().to(self._device, non_blocking=True)
            model.encode_audio(samples, pages, caches)
        self._new.clear()
