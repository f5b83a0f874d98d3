"""Clips that a script gives as arrays of samples, and the wav files that the media process reads. Used by media.py."""

import struct
from typing import Any, NamedTuple

from meshlm.protocol.audio import ITEM_BYTES, SAMPLE_RATE

FLOATS = 3  # what a wav file calls samples of that kind
INT16 = 32768


class Clip(NamedTuple):
    """One channel of float32, little-endian. The media process takes it to the model's rate."""

    samples: bytes
    rate: int

    def wav(self) -> bytes:
        form = struct.pack("<HHIIHH", FLOATS, 1, self.rate, self.rate * ITEM_BYTES, ITEM_BYTES, 8 * ITEM_BYTES)
        body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(self.samples))
        return b"RIFF" + struct.pack("<I", len(body) + len(self.samples)) + body + self.samples


def clip_of(value: Any) -> Clip:
    """Of an array of samples at SAMPLE_RATE, or of one and its rate. ValueError."""
    import numpy as np  # which scripts without sounds do without

    given, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, SAMPLE_RATE)
    try:
        samples = np.asarray(given)
        rate = int(rate)
    except (TypeError, ValueError):
        samples, rate = np.zeros(0), 0
    if samples.dtype == np.int16:
        samples = samples.astype(np.float32) / INT16
    if samples.dtype.kind != "f" or rate < 1:
        raise ValueError("a prompt's 'audio': must be an array of floats or int16, or that and its rate")
    if samples.ndim != 1 or not samples.size or not np.isfinite(samples).all():
        raise ValueError("a prompt's 'audio': must be one channel of finite samples, and not empty")
    return Clip(samples.astype("<f4").tobytes(), rate)
