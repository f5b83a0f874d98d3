"""Files of videos to frames: those that are wanted, in their order; crafted ones are refused by name."""

import numpy as np
import pytest
from msgspec.structs import replace
from video_files import AS, CODECS, SIZE, animation, crafted_videos, frame, video

from meshlm.mediaproc.addresses import Refused
from meshlm.mediaproc.sampling import Sampling
from meshlm.mediaproc.video_limits import VideoFacts, VideoLimits
from meshlm.mediaproc.videos import Clip, decoded
from meshlm.runtime.mesh import raw_video

LIMITS = VideoLimits(100, 100, 10**8, 10**6)
EACH = [(form, codec) for form, codec in AS.items()] + list(CODECS)


def every_second(facts: VideoFacts) -> list[int]:
    return list(range(0, facts.num_frames, 2))


def every(facts: VideoFacts) -> list[int]:
    return list(range(facts.num_frames))


def check_frames(clip: Clip, seed: int) -> None:
    """Greys survive compression."""
    for pixels, index in zip(clip.frames, clip.indices, strict=True):
        expected = frame(seed, index)
        assert abs(pixels[:, 16:].astype(int) - expected[:, 16:]).max() < 12, index


@pytest.mark.parametrize(("form", "codec"), EACH)
def test_wanted_frames_are_decoded(form: str, codec: str) -> None:
    clip = decoded(video(4, form=form, codec=codec), LIMITS, every_second)
    assert clip.facts == VideoFacts(12, 8.0, *SIZE)
    assert clip.indices == [0, 2, 4, 6, 8, 10]
    check_frames(clip, 4)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animations_are_videos(form: str) -> None:
    clip = decoded(animation(form), LIMITS, every)
    assert clip.facts == VideoFacts(5, 4.0, *SIZE)
    check_frames(clip, 3)


@pytest.mark.parametrize("number", [1, 2])
def test_short_videos(number: int) -> None:
    clip = decoded(video(num_frames=number), LIMITS, every)
    assert (clip.frames.shape, clip.indices) == ((number, SIZE[1], SIZE[0], 3), list(range(number)))


def test_a_frame_may_be_wanted_twice_and_beyond_the_last() -> None:
    clip = decoded(video(4), LIMITS, lambda facts: [3, 3, 1, 99])
    assert clip.indices == [3, 3, 1, 11]
    check_frames(clip, 4)


@pytest.mark.parametrize("name", sorted(crafted_videos()))
def test_crafted_files_are_refused_by_name(name: str) -> None:
    data, words = crafted_videos()[name]
    with pytest.raises(Refused) as refused:
        decoded(data, LIMITS, every)
    assert words in refused.value.refusal.text


def test_a_video_that_is_cut_off_is_named() -> None:
    """What stands behind the index of a file that begins with it."""
    data = video(form="matroska", num_frames=40)
    clip = decoded(data[: len(data) // 2], LIMITS, every)
    assert 0 < len(clip.frames) < 40, "what is there of a recording that broke off is a video"


def test_limits_are_named() -> None:
    limits = {
        "lasts 1.5 s; at most 1 (--max-video-seconds)": replace(LIMITS, max_seconds=1),
        "12 frames of the video are wanted; at most 11 (--max-video-frames)": replace(LIMITS, max_frames=11),
        "pixels together; at most 36863 (--max-video-pixels)": replace(LIMITS, max_pixels=12 * 64 * 48 - 1),
        "64 x 48 pixels; at most 3071 (--max-image-pixels)": replace(LIMITS, max_frame_pixels=64 * 48 - 1),
    }
    for data in (video(), animation("WEBP", 12, 125)):
        for words, one in limits.items():
            with pytest.raises(Refused) as refused:
                decoded(data, one, every)
            assert words in refused.value.refusal.text
        whole = replace(LIMITS, max_seconds=1.6, max_frames=12, max_pixels=12 * 64 * 48, max_frame_pixels=64 * 48)
        assert len(decoded(data, whole, every).frames) == 12


def test_frames_of_a_script_are_taken_as_they_are() -> None:
    pixels = np.stack([frame(1, number) for number in range(3)])
    given = raw_video.RawVideo.of_pixels(pixels.tobytes(), SIZE, (0, 4, 9), 10, 5.0)
    clip = decoded(raw_video.pack(given), LIMITS, lambda facts: [0])
    assert (clip.frames == pixels).all()
    assert (clip.indices, clip.facts) == ([0, 4, 9], VideoFacts(10, 5.0, *SIZE))
    bad = {
        "not as many pixels": replace(given, height=49),
        "its pixels are damaged": replace(given, packed=b"no"),
        "sizes and rates": replace(given, width=0),
        "not of the video": replace(given, num_frames=9),
        "--max-video-pixels": replace(given, width=60_000, height=1_000),
    }
    for words, one in bad.items():
        with pytest.raises(Refused) as refused:
            decoded(raw_video.pack(one), replace(LIMITS, max_frame_pixels=10**9), every)
        assert words in refused.value.refusal.text


def test_sampling_is_vllms() -> None:
    facts = VideoFacts(100, 25.0, 8, 8)
    assert Sampling().indices(facts) == np.linspace(0, 99, 32, dtype=int).tolist()
    assert Sampling(num_frames=-1).indices(facts) == list(range(100))
    assert Sampling(fps=2).indices(facts) == np.linspace(0, 99, 8, dtype=int).tolist()
    assert Sampling(num_frames=4, fps=2).indices(facts) == np.linspace(0, 99, 4, dtype=int).tolist()
    assert Sampling(fps=0.01).indices(facts) == [0]
    assert Sampling().indices(VideoFacts(3, 1.0, 8, 8)) == [0, 1, 2]
