"""The media of a script's prompts: vLLM's forms of them as sources for the media process, and their way there (docs/media.md).

An image of Pillow is written as a PNG when its turn comes, and not before: a script may give thousands at once. Owned by client.py.
"""

import asyncio
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.client.media_client import Held, MediaClient
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh import media_parts
from meshlm.runtime.mesh.media_parts import Part, Reading
from meshlm.supervisor.api.clips import Clip, clip_of
from meshlm.supervisor.api.frames import Video, video_of, videos_of
from meshlm.supervisor.errors import raised_as

PILLOW = "image_pil"  # the type of a part with an image of Pillow, and its key; vLLM's
VIDEO = "video"  # likewise with frames
TYPES = {**media_parts.URL_TYPES, PILLOW: Modality.IMAGE, VIDEO: Modality.VIDEO}
DATA, UUIDS = "multi_modal_data", "multi_modal_uuids"
AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I")  # modes that a PNG keeps as they are
LEVEL = 1  # of compression: it goes to a process of this host
READ_AT_ONCE = 16  # prompts
AGAIN_S = 0.5
PATIENCE_S = 5.0  # of waiting for room while no prompt of ours has any; the media process has waited before


class MediaInput(NamedTuple):
    """An item of a prompt: where it comes from, or an image of Pillow or a clip."""

    source: MediaSource
    value: Any = None

    def read(self) -> MediaSource:
        """The source with its data."""
        if self.value is None:
            return self.source
        if isinstance(self.value, Clip):
            return replace(self.source, data=self.value.wav())
        if isinstance(self.value, Video):
            return replace(self.source, data=self.value.data())
        return replace(self.source, data=_png(self.value, self.source.where))


MediaInputs = tuple[MediaInput, ...]


def kwargs_json(*given: Mapping[str, Any] | None) -> bytes:
    """The processor's options: what is said later wins."""
    found = {name: value for one in given for name, value in (one or {}).items()}
    try:
        return msgspec.json.encode(found) if found else b""
    except (TypeError, ValueError) as error:
        raise ValueError(f"mm_processor_kwargs: must be values of JSON: {error}") from None


def of_data(data: Mapping[str, Any], kwargs: bytes, uuids: Any = None) -> MediaInputs:
    """The items of {"image": value, "video": value, "audio": value}: one of each, or a list. uuids: their names, in the same form;
    None in the place of an item is the one that had this name before. ValueError."""
    if not isinstance(uuids, Mapping | None) or (uuids and uuids.keys() - data.keys()):
        raise ValueError(f"a prompt's {UUIDS!r}: must be a dict with the modalities of {DATA!r}")
    found = list[MediaInput]()
    for modality, read in ((Modality.IMAGE, _images), (Modality.VIDEO, _videos), (Modality.AUDIO, _clips)):
        if modality not in data:
            continue
        values = read(data[modality])
        names = _names((uuids or {}).get(modality), len(values))
        for index, (value, name) in enumerate(zip(values, names, strict=True)):
            where = f"{DATA}.{modality}[{index}]"
            if value is None and not name:
                raise ValueError(f"a prompt's {where!r}: None needs a name in {UUIDS!r}")
            source = MediaSource(modality, where, DATA, uuid=name, processor_kwargs_json=kwargs)
            found.append(MediaInput(source, value))
    return tuple(found)


def _names(given: Any, count: int) -> list[str]:
    """A name for each item; "" for those that have none."""
    names = [""] * count if given is None else [given] if isinstance(given, str) else list(given)
    if len(names) != count:
        raise ValueError(f"a prompt's {UUIDS!r}: {len(names)} names for {count} items")
    for name in names:
        if name:
            with raised_as(ValueError, RequestError):
                media_parts.check_uuid(name, UUIDS)
    return [name or "" for name in names]


def _images(value: Any) -> list[Any]:
    images = list(value) if isinstance(value, list | tuple) else [value]
    for image in images:
        if image is not None and not _is_image(image):
            text = f"must be an image of Pillow, or a list of them, and no {type(image).__name__}"
            raise ValueError(f"a prompt's {DATA!r}: 'image': {text}")
    return images


def _videos(value: Any) -> list[Video | None]:
    try:
        return videos_of(value)
    except ValueError as error:
        raise ValueError(f"a prompt's {DATA!r}: 'video': {error}") from None


def _clips(value: Any) -> list[Clip | None]:
    clips = value if isinstance(value, list) and not _are_numbers(value) else [value]
    return [None if one is None else clip_of(one) for one in clips]


def _are_numbers(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], int | float)


def of_messages(
    messages: list[dict[str, Any]], kwargs: bytes, spec: MediaSpec
) -> tuple[list[dict[str, Any]], MediaInputs]:
    """The messages as a template takes them, and their media. RequestError."""
    values: list[Any] = []

    def read(part: Part) -> MediaSource:
        if part.value["type"] == VIDEO:
            return _of_frames(part, values)
        if part.value["type"] != PILLOW:
            values.append(None)
            return media_parts.source_of(part)
        where = f"{part.where}.{PILLOW}"
        image = part.value.get(PILLOW)
        if not _is_image(image) and (image is not None or part.value.get("uuid") is None):
            raise media_parts.wrong(where, f"must be an image of Pillow, and no {type(image).__name__}")
        values.append(image)
        media_parts.check_uuid(uuid := part.value.get("uuid"), where)
        return MediaSource(part.modality, where, "messages", uuid=uuid or "", processor_kwargs_json=part.kwargs)

    shown, sources = media_parts.of_messages(messages, Reading(spec, kwargs, read, TYPES))
    return shown, tuple(map(MediaInput, sources, values))


def _of_frames(part: Part, values: list[Any]) -> MediaSource:
    where = f"{part.where}.{VIDEO}"
    try:
        values.append(video_of(part.value.get(VIDEO)))
    except ValueError as error:
        raise media_parts.wrong(where, str(error)) from None
    return MediaSource(part.modality, where, "messages", processor_kwargs_json=part.kwargs)


class MediaReader:
    """Has items read. What finds no room waits, as long as items of other prompts may make some."""

    def __init__(self) -> None:
        self.client = MediaClient()
        self._turns, self._writing = asyncio.Semaphore(READ_AT_ONCE), asyncio.Lock()

    async def read(self, inputs: Sequence[MediaInput], others_run: Callable[[], bool]) -> Held:
        """The items of a prompt. others_run: whether prompts with images are being answered. RequestError."""
        async with self._turns:
            # One at a time: two prompts may have the same image of Pillow, which is not for two threads.
            async with self._writing:
                sources = await asyncio.to_thread(lambda: [one.read() for one in inputs])
            loop = asyncio.get_running_loop()
            since = loop.time()
            while True:
                try:
                    return await self.client.read(sources)
                except RequestError as error:
                    if others_run():
                        since = loop.time()
                    if error.kind is not ErrorKind.OVERLOADED or loop.time() > since + PATIENCE_S:
                        raise
                await asyncio.sleep(AGAIN_S)


def _is_image(value: Any) -> bool:
    """Whether it is an image of Pillow, which is the caller's and is not imported here."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _png(image: Any, where: str) -> bytes:
    """The pixels as they are given: a photograph's orientation was the caller's to heed. RequestError."""
    found = io.BytesIO()
    try:
        kept = image if image.mode in AS_PNG else image.convert("RGB")
        kept.save(found, "PNG", compress_level=LEVEL, exif=b"")
    except (OSError, ValueError, SyntaxError) as error:  # its file is read only now, and may be damaged
        raise RequestError(ErrorKind.INVALID, f"{where}: cannot be read: {error}"[:300], where.split(".")[0]) from None
    return found.getvalue()
