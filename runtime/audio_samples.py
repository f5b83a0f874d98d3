"""Audio files to samples, by FFmpeg's libraries (PyAV). Frontends (transcriptions) and the media process (audio of chats) have each
file decoded in a process that may die of it: what a file says of itself, FFmpeg takes memory for.

A file comes from whoever may ask, so FFmpeg may use few of its demuxers and decoders: none that opens other files or addresses, as
those of playlists do, and none of pictures. What a file may become in memory is bounded while it is decoded, not by what the file says.
"""

import errno
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.audio import SAMPLE_RATE

Samples = NDArray[np.float32]

DEMUXERS = ("wav", "mp3", "flac", "ogg", "matroska", "mov", "aac", "aiff", "mpeg")  # matroska: webm, too; mov: mp4, m4a
_PCM = (
    "alaw",
    "mulaw",
    "s8",
    "u8",
    *(f"{kind}{order}" for kind in ("s16", "s24", "s32", "f32", "f64") for order in ("le", "be")),
)
DECODERS = (
    *("aac", "alac", "flac", "opus", "vorbis", "mp1float", "mp2", "mp2float", "mp3", "mp3float"),
    *(f"pcm_{kind}" for kind in _PCM),
)
OPTIONS = {"format_whitelist": ",".join(DEMUXERS), "codec_whitelist": ",".join(DECODERS), "protocol_whitelist": "none"}
RATES = (1_000, 768_000)  # samples a second; of fewer, a small frame would become a large one
MAX_CHANNELS = 8  # of 7.1; more take memory for nothing, as one is made of them
TAKEN = "send an audio clip as wav, mp3, flac, ogg, webm, m4a or mp4"


class AudioRefused(Exception):
    """Why a file is not heard; the text is a sentence about it."""


def decode(data: bytes, max_seconds: float, limit: str = "--max-audio-seconds") -> Samples:
    """The file's first audio stream as float32[n], one channel at SAMPLE_RATE. AudioRefused for a file without samples, with samples
    that are no finite numbers, or longer than `max_seconds`, which is the limit of this name. ImportError without PyAV."""
    import av

    try:
        with av.open(io.BytesIO(data), options=OPTIONS, metadata_errors="ignore") as container:
            found = list(_Decoding(av, container, max_seconds, limit).samples())
    except (av.FFmpegError, ValueError) as error:
        if getattr(error, "errno", 0) == errno.ENOMEM:
            raise MemoryError from None
        reason = getattr(error, "strerror", "") or error  # without the number and the name that FFmpeg gives it
        raise AudioRefused(f"this is no audio file that can be read ({reason}); {TAKEN}") from None
    samples = np.concatenate(found) if found else np.zeros(0, np.float32)
    if not len(samples):
        raise AudioRefused("there is no audio in this file")
    if not np.isfinite(samples).all():
        raise AudioRefused("its samples are not all finite numbers")
    return samples


class _Decoding:
    """One file on its way."""

    def __init__(self, av: Any, container: Any, max_seconds: float, limit: str) -> None:
        self._av, self._container, self._max_seconds, self._limit = av, container, max_seconds, limit
        self._left = int(max_seconds * SAMPLE_RATE)
        self._resampler: Any = None
        self._kind: tuple[Any, ...] = ()  # of the frames that the resampler takes

    def samples(self) -> Iterator[Samples]:
        """Packets that cannot be decoded are left out, as where a recording broke off, as long as more can."""
        num_bad = num_good = 0
        for packet in self._container.demux(self._stream()):
            try:
                frames = packet.decode()
            except self._av.error.InvalidDataError:
                num_bad += 1
                continue
            num_good += bool(frames)
            for frame in frames:
                yield from self._resampled(frame)
        yield from self._rest()
        if num_bad > num_good:
            raise AudioRefused(f"most of this file cannot be decoded; {TAKEN}")

    def _stream(self) -> Any:
        if not self._container.streams.audio:
            raise AudioRefused("there is no audio in this file")
        stream = self._container.streams.audio[0]
        context = stream.codec_context
        if context is None or context.codec.name not in DECODERS:
            name = "unknown" if context is None else context.codec.name
            raise AudioRefused(f"the codec {name} is not read; {TAKEN}")
        return stream

    def _resampled(self, frame: Any) -> Iterator[Samples]:
        rate = frame.sample_rate
        if not RATES[0] <= rate <= RATES[1]:
            raise AudioRefused(f"{rate} samples a second; {RATES[0]} to {RATES[1]} are read")
        if (count := frame.layout.nb_channels) > MAX_CHANNELS:
            raise AudioRefused(f"this audio has {count} channels; at most {MAX_CHANNELS} are read")
        if frame.samples / rate * SAMPLE_RATE > self._left + SAMPLE_RATE:  # before it takes memory
            self._too_long()
        kind = (frame.format.name, frame.layout.name, rate)
        if kind != self._kind:
            yield from self._rest()
            self._kind, self._resampler = kind, self._av.AudioResampler(format="flt", rate=SAMPLE_RATE)
        frame.pts = None  # the samples follow each other, whatever the file says of when
        yield from self._mixed(self._resampler.resample(frame))

    def _rest(self) -> Iterator[Samples]:
        """What the resampler still has."""
        if self._resampler is not None:
            yield from self._mixed(self._resampler.resample(None))
            self._resampler = None

    def _mixed(self, frames: list[Any]) -> Iterator[Samples]:
        """The mean of the channels: FFmpeg's own mix makes an audio clip that all have louder."""
        for frame in frames:
            # Packed: PyAV reads beyond the eighth plane of a planar frame of eight channels.
            channels = frame.to_ndarray().reshape(-1, frame.layout.nb_channels)  # float32[samples, channels]
            self._left -= len(channels)
            if self._left < 0:
                self._too_long()
            yield channels.mean(axis=1, dtype=np.float32)

    def _too_long(self) -> None:
        raise AudioRefused(f"this audio is longer than {self._max_seconds:g} seconds ({self._limit})")
