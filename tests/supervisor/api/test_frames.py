"""Videos of scripts: arrays and lists of images become frames for the media process, with what is told of them."""

from typing import Any

import numpy as np
import pytest
from image_files import picture

from meshlm.mediaproc.video_limits import VideoFacts, VideoLimits
from meshlm.mediaproc.videos import decoded
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import part_of
from meshlm.supervisor.api import media
from meshlm.supervisor.api.offline_prompts import of_generate

SPEC = MediaSpec(architecture="", config="", tower="", hidden_size=8, placeholders=((Modality.VIDEO, 3),))
LIMITS = VideoLimits(100, 100, 10**8, 10**6)
FRAMES = np.random.default_rng(0).integers(0, 256, (3, 6, 8, 3), dtype=np.uint8)
PICTURES = [picture(number, (8, 6)) for number in range(3)]
TOLD = {"fps": 5.0, "frames_indices": [0, 4, 9], "total_num_frames": 10}


def of_video(value: Any) -> media.MediaInputs:
    return of_generate({"prompt": "a", "multi_modal_data": {"video": value}}).media


@pytest.mark.parametrize(
    "value", [FRAMES, list(FRAMES), PICTURES, (FRAMES, TOLD)], ids=["array", "list", "images", "told"]
)
def test_a_video_keeps_its_frames(value: Any) -> None:
    (found,) = of_video(value)
    assert (found.source.modality, found.source.where) == (Modality.VIDEO, "multi_modal_data.video[0]")
    clip = decoded(found.read().data, LIMITS, lambda facts: [0])
    expected = np.stack([np.asarray(one) for one in PICTURES]) if value is PICTURES else FRAMES
    assert (clip.frames == expected).all()
    told = isinstance(value, tuple)
    assert clip.indices == (TOLD["frames_indices"] if told else [0, 1, 2])
    assert clip.facts == (VideoFacts(10, 5.0, 8, 6) if told else VideoFacts(3, 24.0, 8, 6))


def test_several_videos_are_a_list() -> None:
    assert [found.source.where for found in of_video([FRAMES, PICTURES, FRAMES])] == [
        f"multi_modal_data.video[{place}]" for place in range(3)
    ]


BAD: dict[str, Any] = {
    "text": "a.mp4",
    "floats": FRAMES / 255.0,
    "one frame's array": FRAMES[0],
    "nothing": [],
    "sizes": [picture(1, (8, 6)), picture(1, (6, 8))],
    "unknown": (FRAMES, {"speed": 2}),
    "indices": (FRAMES, {"frames_indices": [1]}),
    "rate": (FRAMES, {"fps": -1}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_video_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"^a prompt's 'multi_modal_data': 'video': "):
        of_video(BAD[name])


def test_a_chat_takes_frames() -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "hi"}, {"type": "video", "video": PICTURES}]
    shown, (found,) = media.of_messages([{"role": "user", "content": parts}], b"", SPEC)
    assert shown == [{"role": "user", "content": [parts[0], part_of(Modality.VIDEO)]}]
    assert decoded(found.read().data, LIMITS, lambda facts: [0]).frames.shape == (3, 6, 8, 3)
    parts[1]["video"] = "a.mp4"
    with pytest.raises(RequestError, match=r"^messages\[0\].content\[1\].video: must be an array"):
        media.of_messages([{"role": "user", "content": parts}], b"", SPEC)
