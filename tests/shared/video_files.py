"""Files of videos for tests, made by PyAV and Pillow, plain and crafted."""

import io
from functools import cache
from typing import Any

import av
import numpy as np
from image_files import file_of, picture
from numpy.typing import NDArray
from PIL import Image

SIZE = (64, 48)
AS = {"mp4": "libx264", "webm": "libvpx-vp9", "matroska": "libx264", "mov": "mpeg4", "avi": "mpeg4"}
CODECS = (("webm", "libvpx"), ("mp4", "libx265"), ("webm", "libsvtav1"))


def frame(seed: int, number: int, size: tuple[int, int] = SIZE) -> NDArray[np.uint8]:
    """Grey, lighter with the number, with a stripe of the seed."""
    found = np.full((size[1], size[0], 3), number * 20 % 256, np.uint8)
    found[:, :8] = (seed * 37 % 256, seed * 91 % 256, seed * 53 % 256)
    return found


def video(
    seed: int = 1,
    num_frames: int = 12,
    size: tuple[int, int] = SIZE,
    *,
    form: str = "mp4",
    codec: str = "",
    rate: int = 8,
) -> bytes:
    """A clip that differs from those of other seeds."""
    found = io.BytesIO()
    with av.open(found, "w", format=form) as container:
        stream: Any = container.add_stream(codec or AS[form], rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(num_frames):
            made = av.VideoFrame.from_ndarray(frame(seed, number, size), format="rgb24")
            container.mux(stream.encode(made))
        container.mux(stream.encode())
    return found.getvalue()


def sound(form: str = "mp4") -> bytes:
    """A file with audio alone."""
    found = io.BytesIO()
    with av.open(found, "w", format=form) as container:
        stream: Any = container.add_stream("aac", rate=16_000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        samples.sample_rate = 16_000
        container.mux(stream.encode(samples))
        container.mux(stream.encode())
    return found.getvalue()


def animation(form: str = "GIF", num_frames: int = 5, duration: int = 250) -> bytes:
    """Frames as `frame` has them, so many milliseconds each."""
    first, *others = (Image.fromarray(frame(3, number)) for number in range(num_frames))
    return file_of(first, form, save_all=True, append_images=others, duration=duration, loop=0)


@cache
def crafted_videos() -> dict[str, tuple[bytes, str]]:
    """Files that are refused, by name, each with words of the refusal."""
    mp4, webm, unread = video(), video(form="webm"), "is no video that can be read"
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    return {
        "nothing": (b"", unread),
        "text": (b"<!doctype html><p>hello", unread),
        "playlist": (playlist, unread),
        "concat": (b"ffconcat version 1.0\nfile /etc/passwd\n", unread),
        "sdp": (b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n", unread),
        "half an mp4": (mp4[: len(mp4) // 2], unread),
        "an mp4's head": (mp4[:40], unread),
        "a webm's head": (webm[:200], ""),
        "flipped bytes": (mp4[:200] + bytes(byte ^ 0x55 for byte in mp4[200:]), unread),
        "audio alone": (sound(), "there is no video in this file"),
        "a photograph": (file_of(picture(), "JPEG"), unread),
        "another codec": (video(form="avi", codec="mpeg2video", rate=25), "codec mpeg2video are not read"),
        "damaged frames": (b"MESHLM-FRAMES\n" + b"\x91\x01", "the video cannot be decoded"),
    }
