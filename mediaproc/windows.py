"""Voxtral's sounds: windows of half a minute behind one another, each of which as many tokens stand for, silence at the end included.

transformers' processor leaves prompts to mistral-common's tokenizer, so its call takes no sounds; the features are its own.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Windowed(NamedTuple):
    """A clip as the encoder takes it."""

    features: NDArray[np.float32]  # [windows, mel bins, frames]
    num_tokens: int


def takes_windows(processor: Any) -> bool:
    return type(processor).__name__.startswith("Voxtral")


def windowed(processor: Any, samples: NDArray[np.float32], tower: dict[str, Any]) -> Windowed:
    """tower: audio_config of the model's config.json. ValueError where it does not go with the processor."""
    extractor = processor.feature_extractor
    sizes = {"pad_to_multiple_of": extractor.n_samples, "max_source_positions": extractor.nb_max_frames}
    features = processor._retrieve_input_features([samples], **{**processor.audio_kwargs, **sizes})
    hidden, joined = tower.get("hidden_size", 1280), tower.get("intermediate_size", 5120)
    numbers = (
        len(features) * (extractor.nb_max_frames // 2) * hidden
    )  # states of two frames each, some of which one vector is made of
    if numbers % joined:
        raise ValueError(f"{extractor.nb_max_frames // 2} states of {hidden} numbers do not make vectors of {joined}")
    return Windowed(np.asarray(features, np.float32), numbers // joined)
