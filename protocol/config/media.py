"""The settings of images, video and audio in prompts: how many, from where, how large, and how they are made ready for the model."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

MOST_ITEMS = 999  # of a modality in one prompt, where --limit-mm-per-prompt says nothing; vLLM's


class MediaConfig(Struct, frozen=True, kw_only=True):
    """Flags by vLLM's names where it has them. The media process and the frontends read them."""

    limit_mm_per_prompt: Annotated[
        str,
        Meta(
            description='items that one prompt may have, by modality, as JSON or modality=number: {"image": 4}; 0: none'
        ),
    ] = "{}"
    mm_processor_kwargs: Annotated[
        str, Meta(description="JSON object for the model's processor; a request's own mm_processor_kwargs win over it")
    ] = "{}"
    media_io_kwargs: Annotated[
        str,
        Meta(
            description="how files are read, as JSON by modality: "
            '{"image": {"rgba_background_color": [255, 255, 255]}, "video": {"num_frames": 32}}'
        ),
    ] = "{}"
    language_model_only: Annotated[bool, Meta(description="serve the text model alone: images are refused")] = False
    allowed_local_media_path: Annotated[
        str, Meta(description="folder whose files requests may name by file: URLs; default: none")
    ] = ""
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Meta(description="hosts of http(s) URLs that requests may name; default: all", extra={"json": True}),
    ] = ()
    allow_private_media_addresses: Annotated[
        bool, Meta(description="URLs of requests may lead to this host and to private networks")
    ] = False
    mm_processor_cache_gb: Annotated[
        float, Meta(gt=0, description="GiB of shared memory for media that are made ready, those in use included")
    ] = 4.0
    max_media_bytes: Annotated[
        int, Meta(ge=1024, description="bytes of one file, beyond which 400", extra={"bytes": True})
    ] = 20 << 20
    max_image_pixels: Annotated[
        int, Meta(ge=1, description="pixels of one image or frame, whatever few bytes its file has, beyond which 400")
    ] = 64_000_000
    max_video_seconds: Annotated[float, Meta(gt=0, description="seconds of one video, beyond which 400")] = 3600.0
    max_video_frames: Annotated[
        int, Meta(ge=1, description="frames of one video that the model is given, beyond which 400")
    ] = 768
    max_video_pixels: Annotated[
        int, Meta(ge=1, description="pixels of these frames together, before they are resized, beyond which 400")
    ] = 300_000_000
    media_fetch_timeout: Annotated[
        float, Meta(gt=0, description="seconds in which a URL must have answered, all of it")
    ] = 5.0

    @property
    def limits(self) -> dict[str, int]:
        """`limit_mm_per_prompt`, read; vLLM's longer form {"image": {"count": 1, ...}} too. ValueError."""
        given = self.limit_mm_per_prompt.strip() or "{}"
        if not given.startswith("{"):
            pairs = (pair.partition("=") for pair in given.split(","))
            return {name.strip(): int(number) for name, _, number in pairs}
        found = msgspec.json.decode(given, type=dict[str, int | dict[str, Any]])
        return {name: int(value["count"]) if isinstance(value, dict) else value for name, value in found.items()}

    def limit_of(self, modality: str) -> int:
        """The items of this modality that one prompt may have."""
        return 0 if self.language_model_only else self.limits.get(modality, MOST_ITEMS)

    @property
    def background(self) -> tuple[int, int, int]:
        """The colour behind what is transparent."""
        return tuple(self.io_options("image").get("rgba_background_color", (255, 255, 255)))

    def io_options(self, modality: str) -> dict[str, Any]:
        """How files of this modality are read."""
        return msgspec.json.decode(self.media_io_kwargs, type=dict[str, dict[str, Any]]).get(modality, {})
