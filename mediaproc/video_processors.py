"""transformers' processors of videos without torchvision, whose part of them is four functions on tensors: these are here, in torch.

Sampling, sizes, patches and timestamps stay transformers' own. With torchvision installed nothing of this is used. Called by
processors.py.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict

from meshlm.runtime.model_files.json_files import read_json

MODES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # by Pillow's number
NEVER_ALIASED = ("bilinear", "bicubic", "lanczos")
FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
NESTED = "processor_config.json"
CLASSES = {  # by module of transformers.models
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "internvl": "InternVLVideoProcessor",
}
ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
MODULES = {name: module for module, name in CLASSES.items()}
BY_TYPE = {  # transformers' own table is empty without torchvision
    **{module: module for module in CLASSES},
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
}


class TorchFrames(TorchvisionBackend):  # type: ignore[misc]
    """What torchvision does for a processor of videos, whose frames are RGB [videos, frames, 3, height, width] already."""

    def resize(self, image: Tensor, size: SizeDict, resample: Any = None, antialias: bool = True, **_: Any) -> Tensor:
        """ValueError for a size in another form than height and width, and for filters that torch does not have."""
        mode = MODES.get(int(resample if resample is not None else 2))
        if mode is None or not size.height or not size.width:
            raise ValueError(f"frames are not resized to {dict(size)} by filter {resample} without torchvision")
        smooth: dict[str, Any] = {"align_corners": False, "antialias": antialias} if mode in NEVER_ALIASED else {}
        frames = image.reshape(-1, *image.shape[-3:])
        found = frames.new_empty((len(frames), frames.shape[1], size.height, size.width))
        for place, frame in enumerate(frames):  # one by one: resizing takes more memory than a frame has
            found[place] = torch.nn.functional.interpolate(frame[None], (size.height, size.width), mode=mode, **smooth)[
                0
            ]
        return found.reshape(*image.shape[:-3], *found.shape[1:])

    def normalize(self, image: Tensor, mean: Any, std: Any, inplace: bool = False, **_: Any) -> Tensor:
        centre, spread = (torch.as_tensor(one, dtype=image.dtype)[..., None, None] for one in (mean, std))
        return (image.sub_(centre) if inplace else image - centre).div_(spread)

    def center_crop(self, image: Tensor, size: SizeDict, **_: Any) -> Tensor:
        """ValueError for frames that are smaller."""
        height, width = image.shape[-2:]
        if not (size.height and size.width) or height < size.height or width < size.width:
            raise ValueError(f"frames of {width} x {height} cannot be cropped to {dict(size)} without torchvision")
        top, left = int((height - size.height) / 2), int((width - size.width) / 2)
        return image[..., top : top + size.height, left : left + size.width]


def load_video_processor(folder: str) -> Any:
    """That of the model in the folder; None where it has none that does without torchvision."""
    if (found := _named(Path(folder))) is None:
        return None
    name, module = found
    with _stand_in():
        kind = getattr(importlib.import_module(f"transformers.models.{module}.video_processing_{module}"), name)
    own = {"convert_to_rgb": lambda self, video: video}
    made: Any = type(name, (kind, TorchFrames), own)
    return made.from_pretrained(folder, local_files_only=True)


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """An empty torchvision for as long as a module is imported that names it in annotations alone."""
    if importlib.util.find_spec(ABSENT[0]) is not None:
        yield
        return
    made = {name: types.ModuleType(name) for name in ABSENT}
    for name, module in made.items():
        package, _, own = name.rpartition(".")
        if package:
            setattr(made[package], own, module)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def _named(folder: Path) -> tuple[str, str] | None:
    """The class and its module, as the folder's files name it; else as the model's type has it."""
    nested = read_json(folder / NESTED).get("video_processor", {}) if (folder / NESTED).exists() else {}
    files = map(read_json, (folder / name for name in FILES if (folder / name).exists()))
    named = next((name for one in (nested, *files) if (name := one.get("video_processor_type"))), None)
    module = MODULES.get(named) if named else BY_TYPE.get(read_json(folder / "config.json")["model_type"])
    return (named or CLASSES[module], module) if module else None
