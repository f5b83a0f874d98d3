"""Files to samples: what clients send, what is no audio, and what would take too much memory."""

import io
import struct
import sys
from typing import Any

import av
import numpy as np
import pytest
from audio_clips import audio_file, tone
from numpy.typing import NDArray

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.speech import audio_files
from meshlm.protocol.audio import SAMPLE_RATE

LOSSY = ("libmp3lame", "libopus", "aac")
FORMS = [
    ("wav", "pcm_s16le", 44_100, 2),
    ("wav", "pcm_f32le", 16_000, 1),
    ("wav", "pcm_mulaw", 8_000, 1),
    ("mp3", "libmp3lame", 44_100, 1),
    ("flac", "flac", 22_050, 2),
    ("ogg", "libopus", 48_000, 1),
    ("webm", "libopus", 48_000, 2),
    ("ipod", "aac", 44_100, 1),  # m4a
    ("mp4", "aac", 48_000, 2),
    ("adts", "aac", 16_000, 1),
    ("aiff", "pcm_s16be", 16_000, 1),
]


def refused(data: bytes, max_seconds: float = 600) -> str:
    with pytest.raises(HttpError) as caught:
        audio_files.decode(data, max_seconds)
    assert (caught.value.status, caught.value.param) == (400, "file")
    return caught.value.message


@pytest.mark.parametrize(("form", "codec", "rate", "channels"), FORMS)
def test_a_sound_of_each_form(form: str, codec: str, rate: int, channels: int) -> None:
    found = audio_files.decode(audio_file(tone(2.0, rate), form, codec, rate, channels), 600)
    assert found.dtype == np.float32
    assert abs(len(found) / SAMPLE_RATE - 2.0) < (0.15 if codec in LOSSY else 0.01)
    middle = found[8_000:24_000]
    loudest = int(np.argmax(np.abs(np.fft.rfft(middle))))
    assert abs(loudest - 440) <= 1  # a second has as many samples as its spectrum has Hz
    assert abs(float(np.abs(middle).max()) - 0.5) < (0.06 if codec in LOSSY else 0.02)


def test_channels_are_averaged() -> None:
    """A wav with one channel silent, and one whose channels take each other away."""
    one = (tone(0.5) * 32767).astype("<i2")
    for other, loudness in ((np.zeros_like(one), 0.25), (-one, 0.0), (one, 0.5)):
        data = np.stack((one, other), axis=1).tobytes()
        assert abs(np.abs(audio_files.decode(wav(data, 16_000, 2), 600)).max() - loudness) < 0.001


def wav(data: bytes, rate: int, channels: int, bits: int = 16, kind: int = 1) -> bytes:
    size = bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * size, channels * size, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("channels", [3, 6, 7, 8])
def test_files_of_many_channels_are_heard(channels: int) -> None:
    """Eight once ended the process."""
    samples = np.zeros((8_000, channels), "<i2")
    samples[:, -1] = (tone(0.5) * 32767).astype("<i2")
    found = audio_files.decode(wav(samples.tobytes(), 16_000, channels), 600)
    assert abs(np.abs(found).max() - 0.5 / channels) < 0.001


@pytest.mark.parametrize("channels", [9, 64])
def test_files_of_more_channels_are_refused_by_name(channels: int) -> None:
    assert f"{channels} channels; at most 8" in refused(wav(bytes(2 * channels * 100), 16_000, channels))


def test_samples_stay_as_they_are_however_loud() -> None:
    samples = np.array([0.5, -7.0, 7.0] * 100, "<f4")
    assert audio_files.decode(wav(samples.tobytes(), 16_000, 1, 32, 3), 600).tolist() == samples.tolist()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(number: float) -> None:
    samples = np.array([0.5, number, 0.1] * 100, "<f4")
    with pytest.raises(HttpError, match="file: its samples are not all finite numbers"):
        audio_files.decode(wav(samples.tobytes(), 16_000, 1, 32, 3), 600)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        bytes(range(256)) * 40,
        b'{"file": "a.wav"}',
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"RIFF\x24\0\0\0WAVEfmt ",
    ],
)
def test_what_is_no_sound_is_refused(data: bytes) -> None:
    assert "no audio" in refused(data)


def test_a_picture_has_no_sound() -> None:
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        pixels: NDArray[np.uint8] = np.zeros((64, 64, 3), np.uint8)
        for one in (av.VideoFrame.from_ndarray(pixels, format="rgb24"), None):
            container.mux(stream.encode(one))
    assert "there is no audio" in refused(target.getvalue())


def test_a_film_is_heard_and_not_looked_at() -> None:
    target = io.BytesIO()
    samples = tone(1.0, 48_000)
    with av.open(target, "w", format="mp4") as container:
        video: Any = container.add_stream("mpeg4", rate=10)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        audio: Any = container.add_stream("aac", rate=48_000)
        audio.layout = "mono"
        pixels: NDArray[np.uint8] = np.zeros((64, 64, 3), np.uint8)
        for one in (av.VideoFrame.from_ndarray(pixels, format="rgb24"), None):
            container.mux(video.encode(one))
        for start in range(0, 48_000, 1024):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 1024].copy(), "fltp", "mono")
            frame.sample_rate, frame.pts = 48_000, start
            container.mux(audio.encode(frame))
        container.mux(audio.encode(None))
    assert abs(len(audio_files.decode(target.getvalue(), 600)) / SAMPLE_RATE - 1.0) < 0.1


def test_other_codecs_are_refused_by_name() -> None:
    assert "adpcm_ima_wav" in refused(audio_file(tone(1.0), "wav", "adpcm_ima_wav"))


def test_a_sound_without_samples_is_refused() -> None:
    assert "no audio" in refused(wav(b"", 16_000, 1))


@pytest.mark.parametrize("form", [("wav", "pcm_s16le"), ("flac", "flac"), ("ogg", "libopus")])
def test_the_limit_holds_to_the_sample(form: tuple[str, str]) -> None:
    rate = 48_000 if form[1] == "libopus" else 16_000
    data = audio_file(tone(3.0, rate), *form, rate)
    assert "longer than 2 seconds (--max-audio-seconds)" in refused(data, 2)
    assert len(audio_files.decode(data, 4)) >= 47_000


def test_few_bytes_that_would_become_many_are_refused_before_they_do() -> None:
    """An hour of silence in opus takes little, and says nothing of its length where its end is cut off."""
    silence = audio_file(np.zeros(48_000 * 60, np.float32), "ogg", "libopus", 48_000)
    assert len(silence) < 100_000
    assert "longer than 5 seconds" in refused(silence[: len(silence) // 2], 5)
    assert "samples a second" in refused(wav(bytes(4_000), 1, 1, 8), 600)


def test_a_recording_that_broke_off_is_heard_as_far_as_it_goes() -> None:
    data = audio_file(tone(4.0, 44_100), "mp3", "libmp3lame", 44_100)
    assert 1.5 < len(audio_files.decode(data[: len(data) // 2], 600)) / SAMPLE_RATE < 2.5
    data = audio_file(tone(4.0), "flac", "flac")
    assert 1.0 < len(audio_files.decode(data[: len(data) // 2], 600)) / SAMPLE_RATE < 2.5


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(HttpError) as caught:
        audio_files.decode(b"", 600)
    assert caught.value.status == 500
    assert "pip install 'av>=15'" in caught.value.message
