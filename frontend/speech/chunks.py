"""Where an audio clip that is too long for the encoder is cut. Pure; called by parse.py."""

from collections.abc import Iterator

import numpy as np

from meshlm.frontend.speech.audio_files import Samples
from meshlm.protocol.audio import SAMPLE_RATE

SEARCHED = SAMPLE_RATE  # samples: a chunk ends in the last second that it may have ...
WINDOW, STEP = SAMPLE_RATE // 10, SAMPLE_RATE // 100  # ... where 0.1 s have the least energy


def ranges(samples: Samples, seconds: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of the samples of each chunk, of `seconds` at most; together they are all samples."""
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
