"""Files of audio that a test sends: what is heard, and what is crafted to do harm."""

import base64
import io
import struct

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
Samples = NDArray[np.float32]


def clip(seed: int, seconds: float = 0.4, rate: int = RATE) -> Samples:
    """A chord with noise: no two are alike."""
    generator = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    sound = np.sin(2 * np.pi * np.outer(generator.uniform(100, 3000, 4), times)).mean(axis=0)
    found: Samples = (0.5 * sound + generator.normal(0, 0.05, len(times))).astype(np.float32)
    return found


def wav(samples: Samples | bytes, rate: int = RATE, channels: int = 1, claimed: int | None = None) -> bytes:
    """16 bits a sample. claimed: bytes of samples that its head says it has."""
    data = samples if isinstance(samples, bytes) else (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    size = len(data) if claimed is None else claimed
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", 20 + len(head) + size) + body


def silence(seconds: int) -> bytes:
    """An ogg file of few bytes that becomes many."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=48_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), "f4"), format="fltp", layout="mono")
        for number in range(seconds * 50):
            frame.sample_rate, frame.pts = 48_000, number * 960
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return target.getvalue()


def film() -> bytes:
    """A video that has no sound."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for one in (av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24"), None):
            container.mux(stream.encode(one))
    return target.getvalue()


def crafted() -> dict[str, tuple[bytes, str]]:
    """Files by name, each with words of its refusal."""
    good = wav(clip(1))
    metadata = b"LIST" + struct.pack("<I", 2_000_000_000) + b"INFO" + b"INAM" + struct.pack("<I", 1_999_999_988)
    return {
        "text": (b"hello, I am no sound", "no audio file that can be read"),
        "nothing of a head": (good[:11], "no audio file that can be read"),
        "a head alone": (good[:44], "there is no audio"),
        "zeros": (bytes(4096), "no audio file that can be read"),
        "noise": (np.random.default_rng(0).bytes(8192), "no audio"),
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(200), "no audio file that can be read"),
        "a film": (film(), "there is no audio"),
        "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no audio file that can be read"),
        "64 channels": (wav(bytes(128 * 500), channels=64), "64 channels; at most 8"),
        "a thousand channels": (wav(bytes(2000 * 50), channels=1000), "no audio file that can be read"),
        "one sample a second": (wav(bytes(4000), rate=1), "1 samples a second"),
        "10^9 samples a second": (wav(bytes(4000), rate=1_000_000_000), "samples a second"),
        "2 GB of metadata": (good[:12] + metadata + good[12:], "audio"),
        "too short": (wav(clip(1, 0.005)), "too short"),
        "too long": (wav(clip(1, 2.5)), "longer than 2 seconds (all that this model hears of a clip)"),
        "few bytes that become many": (silence(60), "longer than 2 seconds"),
        "not finite": (_floats(np.array([0.1, np.nan] * 4000, "<f4")), "not all finite"),
    }


def readable() -> dict[str, bytes]:
    """Odd files that are heard."""
    good = wav(clip(2))
    return {
        "a head that claims 10^9 samples": wav(clip(2), claimed=2_000_000_000),
        "cut short": good[: len(good) // 2 + 1],
        "eight channels": wav(np.repeat(clip(2), 8), channels=8),
        "8 kHz": wav(clip(2, rate=8000), rate=8000),
        "rubbish behind it": good + b"rubbish" * 100,
    }


def _floats(samples: NDArray[np.float32]) -> bytes:
    head = struct.pack("<HHIIHH", 3, 1, RATE, RATE * 4, 4, 32)
    data = samples.tobytes()
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()
