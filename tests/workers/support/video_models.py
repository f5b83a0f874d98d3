"""Small models that take videos, with random weights: transformers' real processors and model, and items as the media process makes
them, of images and clips in one prompt."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from media_cases import CASES, Case
from media_models import Seeing
from media_processors import IDS
from msgspec.structs import replace

from meshlm.mediaproc.processors import Processor
from meshlm.mediaproc.video_limits import VideoFacts
from meshlm.mediaproc.video_processors import load_video_processor
from meshlm.mediaproc.videos import Clip
from meshlm.protocol.media import Media, MediaItem, Modality
from meshlm.protocol.media_spec import MediaSpec

VIDEO = "<video>"
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
WATCHING = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5", "llava-onevision", "internvl")
_PATCHES = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 24},
}
_SQUARE = {"size": {"height": 16, "width": 16}}
OF_VIDEOS: dict[str, dict[str, Any]] = {  # settings of the processor
    name: _SQUARE if name in ("llava-onevision", "internvl") else _PATCHES for name in WATCHING
}


def clip(seed: int, num_frames: int, width: int = 24, height: int = 20, fps: float = 4.0, every: int = 1) -> Clip:
    """No two frames are alike. every: the whole video has so many times as many frames."""
    generator = np.random.default_rng(seed)
    frames = generator.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    facts = VideoFacts(num_frames * every, fps, width, height)
    return Clip(frames, [place * every for place in range(num_frames)], facts)


class Watching(Seeing):
    """A model that takes images and videos."""

    def __init__(self, name: str, folder: Path) -> None:
        case: Case = CASES[name]
        video = {} if name == "internvl" else {"video_token_id": IDS[VIDEO], "video_token_index": IDS[VIDEO]}
        super().__init__(case._replace(more={**case.more, **_named(case, video)}), folder)
        self.name = name
        self.theirs.lm_head.weight.data[IDS[VIDEO]] = 0
        self.theirs.save_pretrained(folder)
        kept = (folder / "config.json").read_text()
        (folder / "video_preprocessor_config.json").write_text(json.dumps(OF_VIDEOS[name]))
        self.processor.video_processor = load_video_processor(str(folder))
        assert self.processor.video_processor is not None
        assert (folder / "config.json").read_text() == kept
        self.maker = self._maker()

    def _maker(self) -> Processor:
        """The media process's own, with the processor of this model in the place of one that it would load."""
        from meshlm.architectures.media import media_spec

        config = json.loads((self.folder / "config.json").read_text())
        spec = media_spec(config, 48)
        assert isinstance(spec, MediaSpec)
        module = importlib.import_module("meshlm.mediaproc.processors")
        loaded = module._loaded
        try:
            setattr(module, "_loaded", lambda folder: self.processor)  # noqa: B010 - mypy lets nobody assign a function
            return Processor(str(self.folder), spec, {})
        finally:
            setattr(module, "_loaded", loaded)  # noqa: B010

    def made(self, content: Any) -> MediaItem:
        """As the media process leaves it in its file."""
        modality = Modality.VIDEO if isinstance(content, Clip) else Modality.IMAGE
        item, arrays = self.maker.made(modality, content, {})
        path = self.folder / f"{item.digest.hex()}.media"
        with path.open("wb") as file:
            for place, array in zip(item.tensors, arrays, strict=True):
                file.seek(place.offset)
                file.write(array.data)
        return replace(item, path=str(path))

    def mixed(self, text: str, contents: list[Any]) -> tuple[list[int], Media]:
        """The ids of a text with placeholders of both kinds, as the detokenizer expands it: they are the processor's own."""
        ids: list[int] = []
        items, waiting = list[MediaItem](), [self.made(one) for one in contents]
        for word in text.split():
            if word not in (self.placeholder, VIDEO):
                ids += self._words(word, add_special_tokens=False)["input_ids"]
                continue
            item = waiting.pop(0)
            ids += self._words(item.before, add_special_tokens=False)["input_ids"] if item.before else []
            items.append(replace(item, position=len(ids)))
            ids += np.frombuffer(item.replacement, np.int32).tolist()
            ids += self._words(item.after, add_special_tokens=False)["input_ids"] if item.after else []
        assert ids == self.given(text, contents)["input_ids"][0].tolist()
        return ids, Media(tuple(items))

    def given(self, text: str, images: list[Any]) -> Any:
        clips = [one for one in images if isinstance(one, Clip)]
        pictures = [one for one in images if not isinstance(one, Clip)]
        more: dict[str, Any] = {}
        if clips:
            told = [self.maker._of_clip(one) for one in clips]
            metadata = [of["video_metadata"][0] for _, of in told]
            more = {"videos": [frames for frames, _ in told], "video_metadata": metadata, "do_sample_frames": False}
        found = self.processor(text=[text], images=pictures or None, return_tensors="pt", **more)
        return {name: torch.as_tensor(value) for name, value in found.items() if name != "video_metadata"}


def _named(case: Case, names: dict[str, int]) -> dict[str, int]:
    """Those of the names that the configuration has."""
    import transformers

    known = getattr(transformers, case.config)().to_dict()
    return {name: value for name, value in names.items() if name in known}
