"""The model's own processor of transformers, and what it makes of one item. Called in a child of the sandbox (making.py)."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import transformers
from numpy.typing import NDArray
from transformers import AutoProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

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
OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # of the processor's outputs
VIDEO = "video_processor"
CALLED = {  # by modality, how the processor's attributes and arguments have it
    Modality.IMAGE: Called("image_token", "images", "image_processor", "image_grid_thw"),
    Modality.AUDIO: Called("audio_token", "audio", "feature_extractor", ""),
}
NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class MadeItem(NamedTuple):
    """An item without its path, and its tensors in the order of the item's."""

    item: MediaItem
    tensors: list[NDArray[Any]]


class Processor:
    """The processor of the model in `folder`."""

    def __init__(self, folder: str, spec: MediaSpec, kwargs: dict[str, Any]) -> None:
        transformers.logging.set_verbosity_error()
        self._spec, self._kwargs = spec, kwargs
        self._processor = _loaded(folder)
        self._tokenizer = self._processor.tokenizer
        self._valid = self._known_kwargs()
        self.check_kwargs(kwargs)
        if (
            Modality.AUDIO in spec.modalities
            and (rate := self._processor.feature_extractor.sampling_rate) != SAMPLE_RATE
        ):
            raise refused(f"the model hears {rate} samples a second; only {SAMPLE_RATE} are supported")

    def _known_kwargs(self) -> frozenset[str] | None:
        """Names of mm_processor_kwargs; None: the processor does not say. What makes features of sounds has none."""
        if Modality.IMAGE not in self._spec.modalities:
            return frozenset()
        found = getattr(self._processor.image_processor, "valid_kwargs", None)
        return None if found is None else frozenset(found.__annotations__)

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
            if self._valid is not None and name not in self._valid:
                raise refused(f"mm_processor_kwargs: {name[:60]} is nothing that this model's processor knows")

    def made(self, modality: Modality, content: Any, kwargs: dict[str, Any]) -> MadeItem:
        """content: as the modality's reader gives it. Refused for what the processor does not take."""
        self.check_kwargs(kwargs)
        called = CALLED[modality]
        placeholder = str(getattr(self._processor, called.token))
        own = {"sampling_rate": SAMPLE_RATE} if modality is Modality.AUDIO else {**self._kwargs, **kwargs}
        options = {**own, "add_special_tokens": False, "return_tensors": "pt"}
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
    """The processor, without its part for videos where that has no package."""
    try:
        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    except ImportError:  # its processor of videos needs torchvision
        return _for_images(_class_of(folder)).from_pretrained(folder, local_files_only=True)


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
