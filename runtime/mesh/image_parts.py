"""The images among the parts of a chat's messages: what the template is given in their place, and where they come from. Pure.

OpenAI's form is `{"type": "image_url", "image_url": {"url": ...}}`, that of /v1/responses `{"type": "input_image", "image_url": ...}`.
A `uuid` beside it names the image for later requests, which may send it without a url; vLLM has that. RequestError names the part.
Called by frontends and by `LLM.chat`.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from meshlm.protocol.config.media import MediaConfig
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import IMAGE

URL_TYPES = ("image_url", "input_image")
DETAILS = (None, "auto", "low", "high", "original")  # of OpenAI's; the model's processor decides
MAX_URL = 8192  # letters of a URL that is no data: URL
MAX_UUID = 256
SCHEMES = ("http://", "https://", "file://")
ReadPart = Callable[[dict[str, Any], str, bytes], MediaSource]


def of_messages(
    messages: list[dict[str, Any]], kwargs_json: bytes, read: ReadPart | None = None, types: Sequence[str] = URL_TYPES
) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """The messages as a template takes them, and the images in their order. kwargs_json: for the model's processor. read: what makes a
    source of a part of these types, with its path; `source_of` where it is None."""
    read = read or source_of

    def is_image(part: Any) -> bool:
        return isinstance(part, dict) and part.get("type") in types

    found, sources = list(messages), list[MediaSource]()
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_image, content)):
            continue
        parts = []
        for index, part in enumerate(content):
            if is_image(part):
                sources.append(read(part, f"messages[{place}].content[{index}]", kwargs_json))
                part = IMAGE
            elif isinstance(part, dict) and part.get("type") == IMAGE["type"]:
                raise _wrong(f"messages[{place}].content[{index}]", "give an image as a part of type 'image_url'")
            parts.append(part)
        found[place] = {**message, "content": parts}
    return found, sources


def check_count(sources: Sequence[MediaSource], media: MediaConfig, param: str = "messages") -> None:
    """RequestError where a prompt has more images than it may."""
    for kind in {source.kind for source in sources}:
        count = sum(source.kind == kind for source in sources)
        if count > (most := media.limit_of(kind)):
            flag = "--language-model-only" if media.language_model_only else "--limit-mm-per-prompt"
            text = f"{param}: {count} parts with an {kind}; at most {most} ({flag})"
            raise RequestError(ErrorKind.INVALID, text, param)


def source_of(part: dict[str, Any], where: str, kwargs: bytes) -> MediaSource:
    """Where the image of a part of URL_TYPES comes from. RequestError."""
    given, detail, uuid = part.get("image_url"), part.get("detail"), part.get("uuid")
    if isinstance(given, dict):
        detail = given.get("detail", detail)
        given = given.get("url")
        where = f"{where}.image_url.url"
    else:
        where = f"{where}.image_url"
    if part.get("file_id") is not None:
        raise _wrong(where, "file_id is not supported; send the image")
    if detail not in DETAILS:
        raise _wrong(where, f"detail must be one of {', '.join(map(str, DETAILS[1:]))}")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID):
        raise _wrong(where, f"uuid must be a text of 1 to {MAX_UUID} letters")
    if given is None and uuid is None:
        raise _wrong(where, "must be a URL: data:, http: or https:")
    if given is not None and not isinstance(given, str):
        raise _wrong(where, "must be a URL: data:, http: or https:")
    data, url = (b"", "") if not given else _data_or_url(given, where)
    if not data and not url and not uuid:
        raise _wrong(where, "must be a URL: data:, http: or https:")
    return MediaSource("image", where, "messages", data, url, uuid or "", kwargs)


def _data_or_url(given: str, where: str) -> tuple[bytes, str]:
    if given[:5].lower() == "data:":
        return _of_data_url(given, where), ""
    if len(given) > MAX_URL:
        raise _wrong(where, f"a URL has {len(given)} letters; at most {MAX_URL}")
    if not given.lower().startswith(SCHEMES):
        raise _wrong(where, "must be a URL that begins with data:, http:// or https://")
    return b"", given


def _of_data_url(given: str, where: str) -> bytes:
    head, comma, data = given[5:].partition(",")
    mime, *options = head.split(";")
    if not comma:
        raise _wrong(where, "a data: URL needs a comma before its data")
    if mime and not mime.lower().startswith(("image/", "application/octet-stream")):
        raise _wrong(where, f"the data: URL is of type {mime[:60]!r}, which is no image")
    if "base64" not in options:
        return unquote_to_bytes(data) or _empty(where)
    try:
        return base64.b64decode(data, validate=True) or _empty(where)
    except (binascii.Error, ValueError):
        raise _wrong(where, "the data: URL is no valid base64") from None


def _empty(where: str) -> bytes:
    raise _wrong(where, "the data: URL is empty")


def _wrong(where: str, text: str) -> RequestError:
    return RequestError(ErrorKind.INVALID, f"{where}: {text}", where.partition("[")[0])
