"""Parts with media: each modality has its parts, and one that the model does not take is refused by its name."""

from typing import Any

import pytest

from meshlm.protocol.config.media import MediaConfig
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.media_parts import URL_TYPES, Reading, check_count, of_messages
from meshlm.runtime.mesh.messages import check_messages, modality_of, part_of

ALL = tuple((modality, number) for number, modality in enumerate(Modality))


def spec(*modalities: Modality) -> MediaSpec:
    placeholders = tuple(one for one in ALL if one[0] in modalities)
    return MediaSpec(architecture="", config="", tower="", hidden_size=8, placeholders=placeholders)


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("kind", [kind for kind in URL_TYPES if kind != "input_audio"])
def test_a_part_is_of_its_modality(kind: str) -> None:
    modality = URL_TYPES[kind]
    given = message({"type": "text", "text": "a"}, {"type": kind, f"{modality}_url": {"url": "http://a.example/b"}})
    shown, (source,) = of_messages(given, Reading(spec(*Modality)))
    assert shown == message({"type": "text", "text": "a"}, part_of(modality))
    assert (source.modality, source.url) == (modality, "http://a.example/b")
    assert source.where == f"messages[0].content[1].{modality}_url.url"
    check_messages(shown, media=True)
    assert [modality_of(part) for part in shown[0]["content"]] == [None, modality]


@pytest.mark.parametrize("modality", Modality)
def test_a_modality_that_the_model_does_not_take_is_named(modality: Modality) -> None:
    others = [one for one in Modality if one is not modality]
    given = message({"type": f"{modality}_url", f"{modality}_url": {"url": "http://a.example/b"}})
    words = rf"^messages\[0\]\.content\[0\]: this model takes no {modality}; it takes {others[0]} and {others[1]}$"
    with pytest.raises(RequestError, match=words):
        of_messages(given, Reading(spec(*others)))


@pytest.mark.parametrize("modality", Modality)
def test_what_templates_are_given_is_no_part_of_a_request(modality: Modality) -> None:
    with pytest.raises(RequestError, match=f"as a part of type '{modality}_url'"):
        of_messages(message({"type": modality.value}), Reading(spec(*Modality)))


def test_each_modality_has_a_limit_of_its_own() -> None:
    both = (("image_url", "image_url"), ("image_url", "image_url"), ("video_url", "video_url"))
    parts = message(*({"type": kind, name: {"url": "http://a.example/b"}} for kind, name in both))
    _, sources = of_messages(parts, Reading(spec(*Modality)))
    check_count(sources, MediaConfig(limit_mm_per_prompt="image=2,video=1"))
    with pytest.raises(RequestError, match="1 parts with a video; at most 0"):
        check_count(sources, MediaConfig(limit_mm_per_prompt="video=0"))
    with pytest.raises(RequestError, match="2 parts with an image; at most 1"):
        check_count(sources, MediaConfig(limit_mm_per_prompt='{"image": {"count": 1}}'))


def clip(**changes: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"} | changes}


def test_a_clip_in_openais_form() -> None:
    shown, (source, named) = of_messages(
        message(clip(), {"type": "input_audio", "input_audio": None, "uuid": "a"}), Reading(spec(Modality.AUDIO))
    )
    assert shown == message(part_of(Modality.AUDIO), part_of(Modality.AUDIO))
    assert (source.modality, source.data, source.where) == (
        Modality.AUDIO,
        b"RIFF",
        "messages[0].content[0].input_audio.data",
    )
    assert (named.data, named.url, named.uuid) == (b"", "", "a")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (clip(data="%"), r"content\[0\].input_audio.data: it is no valid base64"),
        (clip(data=""), r"input_audio.data: it is empty"),
        (clip(data=3), r"input_audio: must be an object with data, in base64, and format"),
        (clip(format="pcm16"), r"input_audio.format: must be one of wav, mp3"),
        (clip(format=None), r"input_audio.format: must be one of wav, mp3"),
        ({"type": "input_audio"}, r"input_audio: must be an object"),
        ({"type": "input_audio", "input_audio": "x"}, r"input_audio: must be an object"),
        (clip() | {"uuid": ""}, r"input_audio: uuid must be a text"),
        ({"type": "audio_url", "audio_url": {"url": "data:video/mp4;base64,AA=="}}, "'video/mp4', which is no audio"),
    ],
)
def test_clips_that_are_none(part: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        of_messages(message(part), Reading(spec(Modality.AUDIO)))
