"""Images of scripts: vLLM's forms become sources, Pillow's images keep their pixels, and what finds no room waits."""

import asyncio
import io
from typing import Any

import pytest
from image_files import data_url, file_of, picture
from PIL import Image

from meshlm.protocol.edges.media import MediaRead, ReadMedia
from meshlm.protocol.edges.text import TextPrompt, TokenPrompt
from meshlm.protocol.media import MediaItem, Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.client.media_client import MEDIA
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import part_of
from meshlm.supervisor.api import media
from meshlm.supervisor.api.offline_prompts import of_generate
from meshlm.supervisor.api.tokenizer import chat_prompt

SPEC = MediaSpec(architecture="", config="", tower="", hidden_size=8, placeholders=((Modality.IMAGE, 3),))
ITEM = MediaItem(Modality.IMAGE, bytes(32), pack_i32([1]), b"\1")


@pytest.mark.parametrize("text", [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}])
def test_one_image_or_a_list_goes_with_a_prompt(text: dict[str, Any]) -> None:
    one, other = picture(1), picture(2)
    kwargs = {"mm_processor_kwargs": {"max_pixels": 9}}
    given = of_generate({**text, "multi_modal_data": {"image": one}})
    assert given.prompt == of_generate(text).prompt
    assert isinstance(given.prompt, TextPrompt | TokenPrompt)
    assert [found.value for found in given.media] == [one]
    both = of_generate({**text, **kwargs, "multi_modal_data": {"image": [one, other]}}, mm_processor_kwargs={"a": 1})
    assert [found.value for found in both.media] == [one, other]
    assert [found.source.where for found in both.media] == ["multi_modal_data.image[0]", "multi_modal_data.image[1]"]
    assert both.media[0].source.processor_kwargs_json == b'{"a":1,"max_pixels":9}'
    assert of_generate({**text, "multi_modal_data": {"image": []}}).media == ()


@pytest.mark.parametrize("value", [1, "a.png", b"file", [picture(), 3], {"a": 1}])
def test_what_is_no_image_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"multi_modal_data.*must be an image of Pillow, or a list of them, and no "):
        of_generate({"prompt": "a", "multi_modal_data": {"image": value}})


def test_names_of_images() -> None:
    one = picture(1)
    data = {"multi_modal_data": {"image": [one, None]}, "multi_modal_uuids": {"image": ["a", "b"]}}
    given = of_generate({"prompt": "a", **data})
    assert [(found.value, found.source.uuid) for found in given.media] == [(one, "a"), (None, "b")]
    alone = of_generate({"prompt": "a", "multi_modal_data": {"image": one}, "multi_modal_uuids": {"image": "a"}})
    assert [found.source.uuid for found in alone.media] == ["a"]
    part = {"type": "image_pil", "image_pil": one, "uuid": "a"}
    _, chat = media.of_messages([{"role": "user", "content": [part, {**part, "image_pil": None}]}], b"", SPEC)
    assert [(found.value, found.source.uuid) for found in chat] == [(one, "a"), (None, "a")]


@pytest.mark.parametrize(
    ("data", "uuids", "words"),
    [
        ({"image": None}, None, "None needs a name"),
        ({"image": [picture(), None]}, {"image": ["a", None]}, "None needs a name"),
        ({"image": [picture()]}, {"image": ["a", "b"]}, "2 names for 1 items"),
        ({"image": picture()}, {"image": [7]}, "uuid must be a text"),
        ({"image": picture()}, {"image": "a" * 300}, "uuid must be a text"),
        ({"image": picture()}, {"video": ["a"]}, "the modalities of"),
        ({"image": picture()}, ["a"], "must be a dict"),
    ],
)
def test_names_that_are_none(data: dict[str, Any], uuids: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of_generate({"prompt": "a", "multi_modal_data": data, "multi_modal_uuids": uuids})


def test_options_that_no_message_can_have_are_named() -> None:
    with pytest.raises(ValueError, match=r"^mm_processor_kwargs: must be values of JSON"):
        of_generate({"prompt": "a", "multi_modal_data": {"image": picture()}}, mm_processor_kwargs={"a": object()})


def test_a_chat_has_images_in_the_order_of_its_parts() -> None:
    data, one = file_of(picture(3)), picture(1)
    parts = [
        {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": data_url(data)}},
        {"type": "image_pil", "image_pil": one},
        {"type": "image_url", "image_url": {"url": "file:///a.png"}},
    ]
    shown, found = media.of_messages([{"role": "user", "content": parts}], b"", SPEC)
    image = part_of(Modality.IMAGE)
    assert shown == [{"role": "user", "content": [parts[0], image, image, image]}]
    assert [(one.source.data, one.source.url, one.value) for one in found] == [
        (data, "", None),
        (b"", "", one),
        (b"", "file:///a.png", None),
    ]
    assert found[1].source.where == "messages[0].content[2].image_pil"
    assert chat_prompt(shown, None, None, None, True, False, media=True).messages_json
    with pytest.raises(
        RequestError, match=r"^messages\[0\].content\[0\].image_pil: must be an image of Pillow, and no s"
    ):
        media.of_messages([{"role": "user", "content": [{"type": "image_pil", "image_pil": "a.png"}]}], b"", SPEC)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "HSV", "F"])
def test_pillows_images_keep_their_pixels(mode: str) -> None:
    image = picture(5, mode="L").convert("I").convert("I;16") if mode == "I;16" else picture(5, mode=mode)
    (made,) = media.of_data({"image": image}, b"")
    found = Image.open(io.BytesIO(made.read().data))
    expected = image if mode in media.AS_PNG else image.convert("RGB")
    assert (found.mode, found.size) == (expected.mode, expected.size)
    assert found.convert("RGBA").tobytes() == expected.convert("RGBA").tobytes()


def test_a_photograph_that_lies_on_its_side_is_taken_as_it_is() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(file_of(picture(), "JPEG", exif=exif.tobytes())))
    found = Image.open(io.BytesIO(media.of_data({"image": image}, b"")[0].read().data))
    assert found.getexif().get(0x0112) is None
    assert found.tobytes() == image.tobytes()


def test_a_damaged_file_is_its_own_error() -> None:
    whole = file_of(picture(6, (400, 300)))
    image = Image.open(io.BytesIO(whole[: len(whole) // 2]))
    with pytest.raises(RequestError, match=r"^multi_modal_data.image\[0\]: cannot be read: ") as error:
        media.of_data({"image": image}, b"")[0].read()
    assert error.value.param == "multi_modal_data"


class Answers:
    """A media process that says these things in turn."""

    def __init__(self, *refusals: ErrorKind | None) -> None:
        self.media_reader, self._refusals = media.MediaReader(), list(refusals)
        self.media_reader.client.send = self.asked
        self.sizes: list[int] = []

    def asked(self, to: object, message: object) -> None:
        assert to == MEDIA
        if isinstance(message, ReadMedia):
            self.sizes.append(len(message.sources[0].data))
            refusal = self._refusals.pop(0)
            found = (ITEM,) if refusal is None else ()
            answer = MediaRead(message.handle, found, refusal or ErrorKind.INVALID, "no" if refusal else "")
            asyncio.get_running_loop().call_soon(self.media_reader.client.answered, answer)


def read(answers: Answers, others_run: bool) -> Any:
    return asyncio.run(answers.media_reader.read(media.of_data({"image": picture()}, b""), lambda: others_run))


def test_what_finds_no_room_waits_while_others_may_make_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "AGAIN_S", 0.0)
    answers = Answers(ErrorKind.OVERLOADED, ErrorKind.OVERLOADED, None)
    assert read(answers, True).items == (ITEM,)
    assert len(answers.sizes) == 3
    assert min(answers.sizes) > 0
    monkeypatch.setattr(media, "PATIENCE_S", -1.0)
    with pytest.raises(RequestError, match="no"):
        read(Answers(ErrorKind.OVERLOADED), False)
    with pytest.raises(RequestError, match="no"):
        read(Answers(ErrorKind.INVALID), True)
