"""The images of a script's prompts: vLLM's forms of them as sources for the media process, and their way there (docs/media.md).

An image of Pillow is written as a PNG when its turn comes, and not before: a script may give thousands at once. Owned by client.py.
"""

import asyncio
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from meshlm.protocol.edges.media import LEASE_S, MediaSource
from meshlm.protocol.media import Media
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.client.media_client import MediaClient
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh import image_parts

PILLOW = "image_pil"  # the type of a part with an image of Pillow, and its key; vLLM's
DATA = "multi_modal_data"
AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I")  # modes that a PNG keeps as they are
LEVEL = 1  # of compression: it goes to a process of this host
READ_AT_ONCE = 16  # prompts
AGAIN_S = 0.5
PATIENCE_S = LEASE_S + 5  # that there is no room after the last image of ours could be let go


class Picture(NamedTuple):
    """An image of a prompt: where it comes from, or Pillow's image."""

    source: MediaSource
    image: Any = None

    def read(self) -> MediaSource:
        """The source with its data."""
        return self.source if self.image is None else replace(self.source, data=_png(self.image, self.source.where))


Pictures = tuple[Picture, ...]


def kwargs_json(*given: Mapping[str, Any] | None) -> bytes:
    """The processor's options: what is said later wins."""
    found = {name: value for one in given for name, value in (one or {}).items()}
    try:
        return msgspec.json.encode(found) if found else b""
    except (TypeError, ValueError) as error:
        raise ValueError(f"mm_processor_kwargs: must be values of JSON: {error}") from None


def of_data(value: Any, kwargs: bytes) -> Pictures:
    """The images of {"image": value}: one of Pillow, or a list of them. ValueError."""
    images = list(value) if isinstance(value, list | tuple) else [value]
    for image in images:
        if not _is_image(image):
            text = f"must be an image of Pillow, or a list of them, and no {type(image).__name__}"
            raise ValueError(f"a prompt's {DATA!r}: 'image': {text}")
    return tuple(
        Picture(MediaSource("image", f"{DATA}.image[{index}]", DATA, processor_kwargs_json=kwargs), image)
        for index, image in enumerate(images)
    )


def of_messages(messages: list[dict[str, Any]], kwargs: bytes) -> tuple[list[dict[str, Any]], Pictures]:
    """The messages as a template takes them, and their images. RequestError."""
    images: list[Any] = []

    def read(part: dict[str, Any], where: str, kwargs: bytes) -> MediaSource:
        if part["type"] != PILLOW:
            images.append(None)
            return image_parts.source_of(part, where, kwargs)
        if not _is_image(image := part.get(PILLOW)):
            text = f"{where}.{PILLOW}: must be an image of Pillow, and no {type(image).__name__}"
            raise RequestError(ErrorKind.INVALID, text, "messages")
        images.append(image)
        return MediaSource("image", f"{where}.{PILLOW}", "messages", processor_kwargs_json=kwargs)

    types = (*image_parts.URL_TYPES, PILLOW)
    shown, sources = image_parts.of_messages(messages, kwargs, read, types)
    return shown, tuple(map(Picture, sources, images))


class Images:
    """Has images read. What finds no room waits, as long as images of other prompts may make some."""

    def __init__(self) -> None:
        self.media = MediaClient()
        self._turns, self._writing = asyncio.Semaphore(READ_AT_ONCE), asyncio.Lock()

    async def read(self, pictures: Sequence[Picture], others_run: Callable[[], bool]) -> Media:
        """The items of a prompt. others_run: whether prompts with images are being answered. RequestError."""
        async with self._turns:
            # One at a time: two prompts may have the same image of Pillow, which is not for two threads.
            async with self._writing:
                sources = await asyncio.to_thread(lambda: [picture.read() for picture in pictures])
            loop = asyncio.get_running_loop()
            since = loop.time()
            while True:
                try:
                    return Media(await self.media.read(sources))
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
