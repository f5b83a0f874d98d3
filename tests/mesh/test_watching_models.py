"""A small model that takes videos, served whole on the CPU: its answers are transformers' own, and no death changes them."""

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from image_files import data_url
from image_requests import LIMIT_S, ask, body, cached, fresh, ids_of, part, stream
from serving import Serving, serving
from small_seer import Seer
from video_files import animation, crafted_videos, sound, video
from waiting import until

pytestmark = pytest.mark.mesh
COUNT = 8
FLAGS = ("--max-video-seconds", "4", "--max-video-frames", "20", "--max-media-bytes", "1M")
seeds = itertools.count(1)


def clip(data: bytes, mime: str = "video/mp4", **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, mime)}, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer(tmp_path_factory.mktemp("watching") / "model")


@pytest.fixture(scope="module")
def server(model: Seer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    local = tmp_path_factory.mktemp("videos")
    (local / "a.webm").write_bytes(video(77, form="webm"))
    flags = ("--max-model-len", "768", "--dtype", "float32", "--allowed-local-media-path", str(local), *FLAGS)
    with serving(str(model.folder), *flags) as found:
        found.local = local  # type: ignore[attr-defined]
        yield found


def right(model: Seer, answer: Any, *images: bytes, videos: tuple[bytes, ...], count: int = COUNT) -> None:
    prompt, tokens = ids_of(answer)
    assert len(tokens) == count
    assert model.lag(prompt, tokens, *images, videos=videos) < 0.05  # of logits that differ by 1.1 and more


def test_answers_are_transformers_own(model: Seer, server: Serving) -> None:
    first, odd, one = video(next(seeds)), video(next(seeds), 5, (90, 34), form="webm"), video(next(seeds), 1)
    for videos in ((first,), (odd, first), (one,)):
        answer = ask(server, "look ", *map(clip, videos), " what?", count=COUNT, temperature=0)
        right(model, answer, videos=videos)
    again = ask(server, "look ", clip(first), " what?", count=COUNT, temperature=0)
    right(model, again, videos=(first,))
    assert cached(again) > 0


def test_an_image_and_a_video_in_one_prompt(model: Seer, server: Serving) -> None:
    image, moving = fresh(), video(next(seeds), 6)
    answer = ask(server, part(data_url(image)), " and ", clip(moving), "?", count=COUNT, temperature=0)
    right(model, answer, image, videos=(moving,))
    other = ask(server, clip(moving), " and ", part(data_url(image)), "?", count=COUNT, temperature=0)
    right(model, other, image, videos=(moving,))


def test_files_names_and_options(model: Seer, server: Serving) -> None:
    local, moving = server.local, video(next(seeds))  # type: ignore[attr-defined]
    of_file = {"type": "video_url", "video_url": {"url": f"file://{local}/a.webm"}, "uuid": "clip"}
    stored = (local / "a.webm").read_bytes()
    right(model, ask(server, of_file, "?", count=COUNT, temperature=0), videos=(stored,))
    named = {"type": "video_url", "video_url": None, "uuid": "clip"}
    right(model, ask(server, named, "?", count=COUNT, temperature=0), videos=(stored,))
    few = ask(server, clip(moving), "?", mm_processor_kwargs={"num_frames": 2}, temperature=0)
    all_frames = ask(server, clip(moving), "?", temperature=0)
    assert few.json()["usage"]["prompt_tokens"] < all_frames.json()["usage"]["prompt_tokens"]
    unknown = ask(server, clip(moving), "?", mm_processor_kwargs={"nonsense": 2})
    assert (unknown.status_code, "nonsense" in unknown.text) == (400, True)
    gif = ask(server, clip(animation(), "image/gif"), "?", count=COUNT, temperature=0)
    assert gif.status_code == 200, gif.text


def test_crafted_files_are_refused_and_harm_nobody(model: Seer, server: Serving) -> None:
    pid, moving = server.pid("media"), video(next(seeds))
    files = {name: one for name, one in crafted_videos().items() if one[0]}
    files["seconds"] = video(num_frames=41), "lasts 5.1 s; at most 4 (--max-video-seconds)"
    files["frames"] = (
        video(num_frames=24, rate=24),
        "24 frames of the video are wanted; at most 20 (--max-video-frames)",
    )
    files["sound"] = sound(), "there is no video in this file"
    files["bytes"] = bytes(2 << 20), "--max-media-bytes"
    for name, (data, words) in sorted(files.items()):
        answer = ask(server, clip(data), "what?")
        assert answer.status_code == 400, (name, answer.text)
        message = answer.json()["error"]["message"]
        assert words in message, name
        assert "messages[0].content[0].video_url.url" in message, name
    wrong = ask(server, clip(moving, "text/html"), "?")
    assert (wrong.status_code, "which is no video" in wrong.text) == (400, True)
    assert server.pid("media") == pid
    right(model, ask(server, clip(moving), "?", count=COUNT, temperature=0), videos=(moving,))


@pytest.mark.parametrize("role", ["worker", "media"])
def test_a_process_that_dies_changes_nothing(model: Seer, server: Serving, role: str) -> None:
    moving = video(next(seeds))
    asked = body("and ", clip(moving), "?", count=64, temperature=0)
    whole_answer = ask(server, "and ", clip(moving), "?", count=64, temperature=0)
    right(model, whole_answer, videos=(moving,), count=64)
    victims = [server.pid(role)]

    def kill(count: int) -> None:
        if count >= 3 and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    assert stream(server, asked, kill) == ids_of(whole_answer)[1]
    assert not victims
    until(lambda: all(one["state"] == "ready" for one in server.status()["processes"]), limit_s=LIMIT_S)
    other = video(next(seeds))
    right(model, ask(server, clip(other), "?", count=COUNT, temperature=0), videos=(other,))
