"""The log-mel spectrogram that Whisper's encoder takes (Radford et al. 2022, section 2.2).

Bands are as wide as the ear tells apart, by the scale of Slaney's Auditory Toolbox (1998): even up to 1,000 Hz, then each 6.4^(1/27)
times as high as the one before. A band is a triangle over frequencies, whose area is one.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.protocol.audio import HOP, SAMPLE_RATE, WINDOW
from meshlm.protocol.model import AudioEncoderSpec

EVEN_HZ, EVEN_TO_HZ, RATIO = 200 / 3, 1000.0, math.log(6.4) / 27  # a step below, its end, the logarithm of a step above
HIGHEST_HZ = 8000.0
QUIETEST, SPAN = 1e-10, 8.0  # of powers; what lies so many powers of ten below the loudest is as quiet as that


def _of_hz(hz: float) -> float:
    return hz / EVEN_HZ if hz < EVEN_TO_HZ else EVEN_TO_HZ / EVEN_HZ + math.log(hz / EVEN_TO_HZ) / RATIO


def filters(num_bins: int) -> Tensor:
    """float32 [num_bins, 1 + WINDOW / 2]: what each frequency of a window gives to each band."""
    steps = torch.linspace(0.0, _of_hz(HIGHEST_HZ), num_bins + 2, dtype=torch.float64)
    even = EVEN_TO_HZ / EVEN_HZ
    corners = torch.where(steps < even, steps * EVEN_HZ, EVEN_TO_HZ * torch.exp(RATIO * (steps - even)))
    at = torch.linspace(0.0, SAMPLE_RATE / 2, 1 + WINDOW // 2, dtype=torch.float64)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (at - low) / (middle - low), (high - at) / (high - middle)
    return (rising.minimum(falling).clamp(min=0.0) * 2.0 / (high - low)).float()


class LogMelSpectrogram:
    """Its tables for one device."""

    def __init__(self, speech: AudioEncoderSpec, device: torch.device) -> None:
        self._speech = speech
        self._filters = filters(speech.num_mel_bins).to(device)
        self._window = torch.hann_window(WINDOW, device=device, dtype=torch.float32)

    def __call__(self, samples: Tensor) -> Tensor:
        """Samples float32 [n], n of them at most being those of the encoder's audio -> float32 [bins, 2 x max_source_positions]."""
        whole = F.pad(samples, (0, self._speech.num_samples - len(samples)))
        waves = torch.stft(whole, WINDOW, HOP, window=self._window, return_complex=True)
        loudness = (self._filters @ waves[:, :-1].abs().square()).clamp(min=QUIETEST).log10()
        return (loudness.maximum(loudness.max() - SPAN) + 4.0) / 4.0
