"""The model's own processor of transformers, and what it makes of one item. Called in a child of the sandbox (making.py)."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.video_utils import VideoMetadata

from meshlm.mediaproc import sampling, video_limits, video_processors, videos
from meshlm.mediaproc.addresses import refused
from meshlm.mediaproc.windows import takes_windows, windowed
from meshlm.protocol.audio import SAMPLE_RATE
from meshlm.protocol.media import MediaDType, MediaItem, MediaTensor, Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.parts import joined
from meshlm.runtime.model_files.json_files import read_json


class Called(NamedTuple):
    """What a processor calls a modality."""

    token: str  # attribute with the placeholder
    argument: str
    processor: str  # attribute with what makes its tensors
    grid: str  # tensor with frames, rows and columns, of models that have it


ALIGNMENT = 64
OF_TEXT = (
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "video_metadata",
)  # of the processor's outputs
VIDEO = "video_processor"
MAX_LEN = 1 << 20  # tokens
SAMPLING = ("num_frames", "fps")  # options
CALLED = {  # by modality, how the processor's attributes and arguments have it
    Modality.IMAGE: Called("image_token", "images", "image_processor", "image_grid_thw"),
    Modality.AUDIO: Called("audio_token", "audio", "feature_extractor", ""),
    Modality.VIDEO: Called("video_token", "videos", "video_processor", "video_grid_thw"),
}
NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class MadeItem(NamedTuple):
    """An item without its path, and its tensors in the order of the item's."""

    item: MediaItem
    tensors: list[NDArray[Any]]


class Processor:
    """The processor of the model in `folder`."""

    def __init__(self, folder: str, spec: MediaSpec, kwargs: dict[str, Any], max_model_len: int = MAX_LEN) -> None:
        transformers.logging.set_verbosity_error()
        self._spec, self._kwargs, self._max_model_len = spec, kwargs, max_model_len
        self._processor = _loaded(folder)
        self._tokenizer = self._processor.tokenizer
        self._valid = self._known_kwargs()
        self.check_kwargs(kwargs)
        if (
            Modality.AUDIO in spec.modalities
            and (rate := self._processor.feature_extractor.sampling_rate) != SAMPLE_RATE
        ):
            raise refused(f"the model hears {rate} samples a second; only {SAMPLE_RATE} are supported")

    def _known_kwargs(self) -> dict[Modality, frozenset[str] | None]:
        """Names of mm_processor_kwargs; None: the processor does not say. What makes features of sounds has none."""
        found: dict[Modality, frozenset[str] | None] = {Modality.AUDIO: frozenset()}
        for one in self._spec.modalities:
            if one is not Modality.AUDIO:
                named = getattr(getattr(self._processor, CALLED[one].processor, None), "valid_kwargs", None)
                found[one] = None if named is None else frozenset(named.__annotations__)
        return found

    def longest_clip(self, max_seconds: float) -> tuple[float, str]:
        """The seconds that a clip may have, and what says so. A processor would cut off the rest and say nothing."""
        extractor = self._processor.feature_extractor
        if takes_windows(self._processor):
            return max_seconds, "--max-audio-seconds"
        most = inspect.signature(extractor.__call__).parameters.get("max_length")
        samples = getattr(extractor, "n_samples", None) or (most.default if most is not None else None)
        own = getattr(self._processor, "max_audio_len", None) or (samples / SAMPLE_RATE if samples else max_seconds)
        if own < max_seconds:
            return own, "all that this model hears of a clip"
        return max_seconds, "--max-audio-seconds"

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Refused for a name that the processor does not know: it would be without effect."""
        for name in kwargs:
            if all(valid is not None and name not in valid for valid in self._valid.values()):
                raise refused(f"mm_processor_kwargs: {name[:60]} is nothing that this model's processor knows")

    def _own(self, modality: Modality, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The options that are for this modality. Those of sampling are taken before a frame is decoded."""
        given, valid = {**self._kwargs, **kwargs}, self._valid[modality]
        known = {name: value for name, value in given.items() if valid is None or name in valid}
        return {name: value for name, value in known.items() if name not in SAMPLING}

    def indices(self, facts: video_limits.VideoFacts, asked: sampling.Sampling, kwargs: dict[str, Any]) -> list[int]:
        """The frames of a video that the model is given: as the processor's options say, as the server's flag says (asked), as the
        processor does by itself; else as vLLM does by itself. Refused."""
        processor = getattr(self._processor, VIDEO, None)
        if processor is None:
            raise refused("this model's processor takes no videos")
        given = {**self._kwargs, **kwargs}
        wanted = {name: given[name] for name in SAMPLING if given.get(name) is not None}
        if not wanted and (asked.is_given or not processor.do_sample_frames):
            return asked.indices(facts)
        try:
            found = processor.sample_frames(_metadata(facts), **wanted)
        except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
            raise refused(f"the model's processor cannot sample the video: {error}"[:300]) from None
        return [int(one) for one in found]

    def _of_clip(self, clip: videos.Clip) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """The frames and what the processor is told of them. Where they are fewer than are merged along time, the last one stays."""
        missing = max(0, getattr(self._processor.video_processor, "temporal_patch_size", 1) - len(clip.frames))
        frames = np.concatenate((clip.frames, *[clip.frames[-1:]] * missing)) if missing else clip.frames
        metadata = _metadata(clip.facts, [*clip.indices, *clip.indices[-1:] * missing])
        return frames, {"video_metadata": [metadata], "do_sample_frames": False}

    def _times(self, tensors: dict[str, NDArray[Any]]) -> tuple[int, ...]:
        """The frames' positions of M-RoPE, where these go by seconds (Qwen2.5-VL). Refused."""
        if (found := tensors.get("second_per_grid_ts")) is None:
            return ()
        values = msgspec.json.decode(self._spec.config)
        vision = CONFIG_MAPPING[values["model_type"]].from_dict(values).vision_config
        interval = vision.tokens_per_second * torch.from_numpy(found.reshape(-1))[0]
        times = tuple((torch.arange(int(tensors["video_grid_thw"].reshape(-1)[0])) * interval).long().tolist())
        if times[-1] >= self._max_model_len:
            text = f"the video's last frame is at position {times[-1]}; less than {self._max_model_len} is taken"
            raise refused(f"{text} (--max-model-len)")
        return times

    def made(self, modality: Modality, content: Any, kwargs: dict[str, Any]) -> MadeItem:
        """content: as the modality's reader gives it. Refused for what the processor does not take."""
        self.check_kwargs(kwargs)
        called, more = CALLED[modality], dict[str, Any]()
        if isinstance(content, videos.Clip):
            content, more = self._of_clip(content)
        placeholder = str(getattr(self._processor, called.token))
        own = {"sampling_rate": SAMPLE_RATE} if modality is Modality.AUDIO else self._own(modality, kwargs)
        options = {**own, **more, "add_special_tokens": False, "return_tensors": "pt"}
        try:
            if takes_windows(self._processor):
                made = self._of_windows(content)
            else:
                made = self._processor(text=[placeholder], **{called.argument: [content]}, **options)
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:  # an image of extreme shape, say
            raise refused(f"the model's processor refuses the {modality}: {error}"[:300]) from None
        ids = [int(token) for token in np.asarray(made["input_ids"]).reshape(-1)]
        if self._spec.token_id(modality) not in ids:
            raise refused(f"the {modality} is too short: no token stands for it")
        first, last = self._core(ids, modality)
        is_vector = bytes(token == self._spec.token_id(modality) for token in ids[first:last])
        tensors = {name: _array(value) for name, value in sorted(made.items()) if name not in OF_TEXT}
        places, offset = list[MediaTensor](), 0
        for name, array in tensors.items():
            places.append(MediaTensor(name, cast(MediaDType, array.dtype.name), array.shape, offset))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        item = MediaItem(
            modality=modality,
            digest=_digest(tensors, ids),
            replacement=pack_i32(ids[first:last]),
            is_vector=is_vector,
            grid=self._grid(tensors, called, is_vector.count(1)),
            tensors=tuple(places),
            is_uncut=self._spec.is_uncut and modality is not Modality.AUDIO,
            placeholder=int(self._tokenizer.convert_tokens_to_ids(placeholder)),
            before=self._text(ids[:first]),
            after=self._text(ids[last:]),
            times=self._times(tensors),
        )
        return MadeItem(item, list(tensors.values()))

    def _of_windows(self, samples: Any) -> dict[str, Any]:
        clip = windowed(self._processor, samples, json.loads(self._spec.config).get("audio_config") or {})
        return {"input_ids": [self._spec.token_id(Modality.AUDIO)] * clip.num_tokens, "input_features": clip.features}

    def _core(self, ids: list[int], modality: Modality) -> tuple[int, int]:
        """The first and last of the tokens that no text around them can change, the latter exclusive: from the first added token on."""
        added = self._tokenizer.added_tokens_decoder
        vector = self._spec.token_id(modality)
        places = [place for place, token in enumerate(ids) if token in added or token == vector]
        return places[0], places[-1] + 1

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids)) if ids else ""

    def _grid(self, tensors: dict[str, NDArray[Any]], called: Called, num_vectors: int) -> tuple[int, int, int]:
        """Frames, rows and columns of the vectors."""
        if (found := tensors.get(called.grid)) is None:
            return 1, 1, num_vectors
        frames, rows, columns = (int(number) for number in found.reshape(-1))
        merged = int(getattr(getattr(self._processor, called.processor), "merge_size", 1))
        return frames, rows // merged, columns // merged


def _metadata(facts: video_limits.VideoFacts, indices: list[int] | None = None) -> VideoMetadata:
    return VideoMetadata(
        total_num_frames=facts.num_frames,
        fps=facts.fps,
        width=facts.width,
        height=facts.height,
        duration=facts.seconds,
        frames_indices=indices,
    )


def _array(value: Any) -> NDArray[Any]:
    """A tensor as the numbers of MediaDType."""
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    elif array.dtype.name not in ("uint8", "int32", "int64", "bool"):
        array = array.astype(np.int64)
    return np.ascontiguousarray(array)


def _digest(tensors: dict[str, NDArray[Any]], ids: list[int]) -> bytes:
    """Of all that the model sees of an item."""
    digest = hashlib.sha256(joined(b"media", pack_i32(ids)))
    for name, array in tensors.items():
        digest.update(joined(name.encode(), array.dtype.name.encode(), str(array.shape).encode()))
        digest.update(array.data)
    return digest.digest()


def _loaded(folder: str) -> Any:
    """The processor, with another part for videos where that has no package."""
    try:
        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    except ImportError:  # its processor of videos needs torchvision
        found = _for_images(_class_of(folder)).from_pretrained(folder, local_files_only=True)
        setattr(found, VIDEO, video_processors.load_video_processor(folder))
        return found


def _class_of(folder: str) -> Any:
    named = next(
        (
            name
            for file in NAMED_IN
            if Path(folder, file).exists() and (name := read_json(Path(folder, file)).get("processor_class"))
        ),
        None,
    )
    if named is None:
        named = PROCESSOR_MAPPING_NAMES[read_json(Path(folder, "config.json"))["model_type"]]
    return processor_class_from_name(named)


def _for_images(kind: Any) -> Any:
    """The same processor with nothing in the place of its processor of videos."""

    class ForImages(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument) if argument is None else super().check_argument_for_proper_class(name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, *arguments: Any, **kwargs: Any) -> list[Any]:
            names = cls.get_attributes()

            own = {"get_attributes": classmethod(lambda cls: [name for name in names if name != VIDEO])}
            others = type("Others", (cls,), own)
            found = iter(kind._get_arguments_from_pretrained.__func__(others, *arguments, **kwargs))
            return [None if name == VIDEO else next(found) for name in names]

    ForImages.__name__ = kind.__name__
    return ForImages
