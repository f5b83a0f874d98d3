"""Which frames of a video the model is given where its processor does not decide: vLLM's way, as --media-io-kwargs has it. Pure."""

import math

from msgspec import Struct

from meshlm.mediaproc.video_limits import VideoFacts

NUM_FRAMES = 32  # vLLM's


class Sampling(Struct, frozen=True):
    """So many frames at most, as far from one another. -1: all."""

    num_frames: int = NUM_FRAMES
    fps: float = -1  # and no more than so many a second
    is_given: bool = False

    def indices(self, facts: VideoFacts) -> list[int]:
        """From the first frame to the last."""
        number = facts.num_frames if self.num_frames <= 0 else min(self.num_frames, facts.num_frames)
        if self.fps > 0:
            number = min(number, math.floor(facts.seconds * self.fps))
        number = max(1, number)
        if number == 1:
            return [0]
        return [(facts.num_frames - 1) * place // (number - 1) for place in range(number)]
