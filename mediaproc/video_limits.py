"""What a video may be, and what is known of one before a frame is decoded."""

from typing import NamedTuple

from msgspec import Struct


class VideoLimits(Struct, frozen=True):
    """What a video may be, beside its bytes."""

    max_seconds: float
    max_frames: int  # that the model is given
    max_pixels: int  # of these together
    max_frame_pixels: int


class VideoFacts(NamedTuple):
    """What is known before a frame is decoded."""

    num_frames: int
    fps: float
    width: int
    height: int

    @property
    def seconds(self) -> float:
        return self.num_frames / self.fps
