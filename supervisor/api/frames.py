"""Frames of a video that a script gives, as arrays or images of Pillow, packed for the media process. Used by media.py."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshlm.runtime.mesh import raw_video

RATE = 24.0  # frames a second, where nobody says; transformers'
EIGHT_BITS = 255
FORMS = "must be an array [frames, height, width, 3] of uint8, a list of images, or one of these and a dict that tells of it"
TOLD = ("fps", "total_num_frames", "frames_indices", "duration", "width", "height", "video_backend", "do_sample_frames")


class Video(NamedTuple):
    """uint8[frames, height, width, 3], not packed yet, and what is told of it."""

    frames: Any
    fps: float
    indices: tuple[int, ...]
    num_frames: int

    def data(self) -> bytes:
        """As the media process reads it."""
        _, height, width, _ = self.frames.shape
        pixels = self.frames.tobytes()
        return raw_video.pack(
            raw_video.RawVideo.of_pixels(pixels, (width, height), self.indices, self.num_frames, self.fps)
        )


def video_of(value: Any) -> Video:
    """ValueError says what the value is not."""
    import numpy as np  # which scripts without videos do without

    given, told = (
        value if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping) else (value, {})
    )
    try:
        frames = np.stack([np.asarray(one) for one in given]) if isinstance(given, list | tuple) else np.asarray(given)
    except (TypeError, ValueError):
        raise ValueError(FORMS) from None
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(FORMS)
    if unknown := told.keys() - set(TOLD):
        raise ValueError(f"what is told of a video has no {min(unknown)!r}")
    fps = told.get("fps") or RATE
    indices = told.get("frames_indices")
    indices = tuple(range(len(frames)) if indices is None else map(int, indices))
    number = told.get("total_num_frames") or max(indices, default=0) + 1
    if len(indices) != len(frames) or not isinstance(fps, int | float) or not 0 < fps <= 1000:
        raise ValueError("fps must be a number above 0, and frames_indices one of each frame")
    return Video(frames, float(fps), indices, int(number))


def videos_of(value: Any) -> list[Video | None]:
    """One video, or a list of some, None where one has its name alone: a list of images is one."""
    several = isinstance(value, list) and value and all(one is None or _is_video(one) for one in value)
    return [None if one is None else video_of(one) for one in (value if several else [value])]


def _is_video(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 4
