"""The images, videos and sounds among the parts of a chat's messages: what the template is given in their place, and where they come
from. Pure.

OpenAI's form is `{"type": "image_url", "image_url": {"url": ...}}`, that of /v1/responses `{"type": "input_image", "image_url": ...}`;
videos and sounds have vLLM's, `video_url` and `audio_url`, and sounds OpenAI's `{"type": "input_audio", "input_audio": {"data": ...,
"format": "wav"}}` as well. A `uuid` beside it names the item for later requests, which may send it without a url; vLLM has that.
RequestError names the part. Called by frontends and by `LLM.chat`.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from msgspec.structs import replace

from meshlm.protocol.config.media import MediaConfig
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import part_of

URL_TYPES = {  # of parts, with the modality of each; the URL stands in a field of the modality's name and `_url`
    "image_url": Modality.IMAGE,
    "input_image": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}
DETAILS = (None, "auto", "low", "high", "original")  # of OpenAI's; the model's processor decides
FORMATS = (
    "wav",
    "mp3",
    "flac",
    "ogg",
    "opus",
    "webm",
    "m4a",
    "mp4",
    "aac",
    "aiff",
)  # of input_audio; what a file is, it says itself
MAX_URL = 8192  # letters of a URL that is no data: URL
MAX_UUID = 256
SCHEMES = ("http://", "https://", "file://")
TYPES = {  # of data: URLs
    Modality.IMAGE: ("image/",),
    Modality.VIDEO: ("video/", "image/gif", "image/webp"),
    Modality.AUDIO: ("audio/",),
}
NAMES = {Modality.IMAGE: "an image", Modality.VIDEO: "a video", Modality.AUDIO: "audio"}


class Part(NamedTuple):
    """A part with an item."""

    value: dict[str, Any]
    modality: Modality
    where: str  # messages[0].content[1]
    kwargs: bytes  # for the model's processor


ReadPart = Callable[[Part], MediaSource]


class Reading(NamedTuple):
    """How parts are read. `read` makes a source of a part of one of `types`."""

    spec: MediaSpec
    kwargs_json: bytes = b""
    read: ReadPart | None = None  # None: source_of
    types: Mapping[str, Modality] = URL_TYPES


def of_messages(messages: list[dict[str, Any]], reading: Reading) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """The messages as a template takes them, and the items' sources in their order."""
    found, sources = list(messages), list[MediaSource]()
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        parts = []
        for index, part in enumerate(content):
            where = f"messages[{place}].content[{index}]"
            modality = _modality_of(part, reading, where)
            if modality is not None:
                sources.append((reading.read or source_of)(Part(part, modality, where, reading.kwargs_json)))
                part = part_of(modality)
            parts.append(part)
        found[place] = {**message, "content": parts}
    return found, sources


def _modality_of(part: Any, reading: Reading, where: str) -> Modality | None:
    """None: the part is no item. RequestError for what the model does not take, and for what only templates are given."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    if (modality := reading.types.get(kind)) is not None:
        check_modality(modality, reading.spec, where)
    elif kind in list(Modality):
        named = next(name for name, one in URL_TYPES.items() if one == kind)
        raise wrong(where, f"give {NAMES[Modality(kind)]} as a part of type {named!r}")
    return modality


def check_modality(modality: Modality, spec: MediaSpec, where: str) -> None:
    """RequestError where the model does not take it."""
    if modality not in spec.modalities:
        raise wrong(where, f"this model takes no {modality}; it takes {' and '.join(spec.modalities)}")


def of_data(data: Mapping[str, Any], uuids: Mapping[str, Any], reading: Reading) -> list[MediaSource]:
    """The sources of a completion's items: by modality a URL, or a list of them, in the order of the placeholders in its prompt. A null
    is the item of its uuid. RequestError."""
    found = list[MediaSource]()
    for name in {**data, **uuids}:
        if name not in list(Modality) or name not in data:
            raise wrong(f"multi_modal_{'data' if name in data else 'uuids'}.{name[:60]}", _NO_DATA)
        modality, given, names = Modality(name), _list_of(data[name]), _list_of(uuids.get(name))
        check_modality(modality, reading.spec, f"multi_modal_data.{name}")
        if names and len(names) != len(given):
            raise wrong(f"multi_modal_uuids.{name}", f"has {len(names)} names for {len(given)} items")
        for index, one in enumerate(given):
            value = {"type": f"{name}_url", f"{name}_url": one, "uuid": names[index] if names else None}
            part = Part(value, modality, f"multi_modal_data.{name}[{index}]", reading.kwargs_json)
            found.append(replace(source_of(part), param="multi_modal_data"))
    return found


_NO_DATA = 'give a URL, or a list of them, by modality: {"image": ["data:image/png;base64,..."]}'


def _list_of(given: Any) -> list[Any]:
    return [] if given is None else given if isinstance(given, list) else [given]


def check_count(sources: Sequence[MediaSource], media: MediaConfig, param: str = "messages") -> None:
    """RequestError where a prompt has more items of a modality than it may."""
    for modality in {source.modality: None for source in sources}:
        count = sum(source.modality == modality for source in sources)
        if count > (most := media.limit_of(modality)):
            flag = "--language-model-only" if media.language_model_only else "--limit-mm-per-prompt"
            text = f"{param}: {count} parts with {NAMES[modality]}; at most {most} ({flag})"
            raise RequestError(ErrorKind.INVALID, text, param)


def source_of(part: Part) -> MediaSource:
    """Where the item of a part of URL_TYPES comes from. RequestError."""
    if part.value["type"] == "input_audio":
        return _of_input_audio(part)
    value, where, field = part.value, part.where, f"{part.modality}_url"
    given, detail, uuid = value.get(field), value.get("detail"), value.get("uuid")
    if isinstance(given, dict):
        detail = given.get("detail", detail)
        given = given.get("url")
        where = f"{where}.{field}.url"
    else:
        where = f"{where}.{field}"
    if value.get("file_id") is not None:
        raise wrong(where, f"file_id is not supported; send the {part.modality}")
    if detail not in DETAILS:
        raise wrong(where, f"detail must be one of {', '.join(map(str, DETAILS[1:]))}")
    check_uuid(uuid, where)
    if given is None and uuid is None:
        raise wrong(where, "must be a URL: data:, http: or https:")
    if given is not None and not isinstance(given, str):
        raise wrong(where, "must be a URL: data:, http: or https:")
    data, url = (b"", "") if not given else _data_or_url(given, part.modality, where)
    if not data and not url and not uuid:
        raise wrong(where, "must be a URL: data:, http: or https:")
    return MediaSource(part.modality, where, "messages", data, url, uuid or "", part.kwargs)


def _of_input_audio(part: Part) -> MediaSource:
    given, uuid, where = part.value.get("input_audio"), part.value.get("uuid"), f"{part.where}.input_audio"
    check_uuid(uuid, where)
    if given is None and uuid is not None:
        return MediaSource(part.modality, where, "messages", uuid=uuid, processor_kwargs_json=part.kwargs)
    if not (isinstance(given, dict) and isinstance(given.get("data"), str)):
        raise wrong(where, "must be an object with data, in base64, and format")
    if given.get("format") not in FORMATS:
        raise wrong(f"{where}.format", f"must be one of {', '.join(FORMATS)}")
    data = _of_base64(given["data"], f"{where}.data")
    return MediaSource(part.modality, f"{where}.data", "messages", data, "", uuid or "", part.kwargs)


def check_uuid(uuid: Any, where: str) -> None:
    """RequestError where a client's name for an item is none."""
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID):
        raise wrong(where, f"uuid must be a text of 1 to {MAX_UUID} letters")


def _data_or_url(given: str, modality: Modality, where: str) -> tuple[bytes, str]:
    if given[:5].lower() == "data:":
        return _of_data_url(given, modality, where), ""
    if len(given) > MAX_URL:
        raise wrong(where, f"a URL has {len(given)} letters; at most {MAX_URL}")
    if not given.lower().startswith(SCHEMES):
        raise wrong(where, "must be a URL that begins with data:, http:// or https://")
    return b"", given


def _of_data_url(given: str, modality: Modality, where: str) -> bytes:
    head, comma, data = given[5:].partition(",")
    mime, *options = head.split(";")
    if not comma:
        raise wrong(where, "a data: URL needs a comma before its data")
    if mime and not mime.lower().startswith((*TYPES[modality], "application/octet-stream")):
        raise wrong(where, f"the data: URL is of type {mime[:60]!r}, which is no {modality}")
    if "base64" not in options:
        return unquote_to_bytes(data) or _empty(where, "the data: URL")
    return _of_base64(data, where, "the data: URL")


def _of_base64(data: str, where: str, what: str = "it") -> bytes:
    try:
        return base64.b64decode(data, validate=True) or _empty(where, what)
    except (binascii.Error, ValueError):
        raise wrong(where, f"{what} is no valid base64") from None


def _empty(where: str, what: str) -> bytes:
    raise wrong(where, f"{what} is empty")


def wrong(where: str, text: str) -> RequestError:
    """A refusal of what stands there."""
    return RequestError(ErrorKind.INVALID, f"{where}: {text}", re.split(r"[.\[]", where)[0])
