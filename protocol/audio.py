"""Audio on its way from the client to the encoder of a speech-to-text model, and the tokens that tell such a model what to write."""

import hashlib

from msgspec import Struct

from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.wire.parts import joined

SAMPLE_RATE = 16_000  # samples a second
WINDOW, HOP = 400, 160  # samples of a window of the short-time Fourier transform, and from one window to the next
ITEM_BYTES = 4
# of SamplingParams.extra_args: true where the text is to say when things are said
WHISPER_TIMESTAMPS = "whisper_timestamps"


class Audio(ExtraKind, frozen=True, tag="audio"):
    """One channel at SAMPLE_RATE. `samples` are float32, little-endian; the loudest that a file of integers can hold is 1."""

    samples: bytes

    @property
    def num_samples(self) -> int:
        return len(self.samples) // ITEM_BYTES

    @property
    def num_bytes(self) -> int:
        return len(self.samples)

    def key_parts(self, begin: int, end: int) -> bytes:
        """Every token sees all of the audio, so the first block's key has it, and with it the keys of all behind."""
        return b"" if begin else joined(b"audio", hashlib.sha256(self.samples).digest())


class SpeechTokens(Struct, frozen=True, kw_only=True):
    """The tokens by which a model is told what to write of an audio clip (generation_config.json of Whisper)."""

    start: int  # that a text begins with
    languages: dict[str, int] = {}  # by ISO 639-1 code, without marks around it; none: the model knows English alone
    tasks: dict[str, int] = {}  # transcribe, translate; none likewise
    no_timestamps: int  # the token behind it is that of 0.00 seconds, and so on in steps of 0.02
    previous: int = -1  # that text of before stands behind; -1: the model takes none
    begin_suppress_tokens: tuple[int, ...] = ()  # that no answer begins with
    # of a text with times: the first one is no later than so many steps of 0.02 s; -1: it may be any
    max_initial_timestamp_index: int = -1
    seconds: int = 30  # of an audio clip that the encoder takes at once
