"""Audio files to samples (runtime/audio_samples.py), as the target of a sandbox, and samples to chunks. HttpError names `file`."""

import contextlib
from collections.abc import Iterator

import msgspec
import numpy as np

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.speech.audio_decoder import DECODED, REFUSED, not_installed
from meshlm.protocol.audio import SAMPLE_RATE
from meshlm.runtime import audio_samples
from meshlm.runtime.audio_samples import AudioRefused, Samples
from meshlm.runtime.sandbox.fork_server import Handle, answering

SEARCHED = SAMPLE_RATE  # samples: a chunk ends in the last second that it may have ...
WINDOW, STEP = SAMPLE_RATE // 10, SAMPLE_RATE // 100  # ... where 0.1 s have the least energy


def make(argument: bytes) -> Handle:
    """Runs once in the fork server of audio_decoder.py. argument: the most seconds that a file may hold, as JSON."""
    max_seconds = msgspec.json.decode(argument, type=float)
    with contextlib.suppress(ImportError):  # the answers say so
        import av  # noqa: F401

    def decoded(data: bytes) -> bytes:
        try:
            return DECODED + decode(data, max_seconds).tobytes()
        except HttpError as error:
            return REFUSED + msgspec.msgpack.encode((error.status, error.message, error.param, error.kind))

    return answering(decoded)


def decode(data: bytes, max_seconds: float) -> Samples:
    """See audio_samples.decode. HttpError."""
    try:
        return audio_samples.decode(data, max_seconds)
    except ImportError:
        raise not_installed("PyAV (av)") from None
    except AudioRefused as refused:
        raise field_error("file", str(refused)) from None


def ranges(samples: Samples, seconds: int) -> Iterator[tuple[int, int]]:
    """Where an audio clip that is too long for the encoder is cut: first and last + 1 of the samples of each chunk of `seconds`."""
    longest, begin = seconds * SAMPLE_RATE, 0
    while len(samples) - begin > longest:
        latest = begin + longest
        searched = max(latest - SEARCHED, begin + longest // 2)
        cut = searched + _quietest(samples[searched:latest])
        yield begin, cut
        begin = cut
    yield begin, len(samples)


def _quietest(samples: Samples) -> int:
    """The middle of the window with the least energy, the last of several that have it."""
    energy = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    windows = energy[WINDOW::STEP] - energy[: len(energy) - WINDOW : STEP]
    place = len(windows) - 1 - int(np.argmin(windows[::-1]))
    return place * STEP + WINDOW // 2
