"""What makes vectors of a modality in transformers' models: a method of their own, or the same steps as in their forward."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.media import Modality

Features = Callable[..., Any]
"""Gives the vectors themselves, or an output that has them as `pooler_output`."""


def features_of(model: Any, modality: Modality) -> Features:
    """model: the one without a head. AttributeError where it takes nothing of the modality."""
    if modality is Modality.AUDIO and model.config.model_type == "qwen2_audio":
        return _of_qwen2_audio(model)
    if modality is Modality.IMAGE and model.config.model_type == "llama4":
        return _of_llama4(model)
    if modality is Modality.VIDEO and not hasattr(model, "get_video_features"):  # a video is a list of images
        modality = Modality.IMAGE
    found: Features = getattr(model, f"get_{modality}_features")
    return _valid_of(found) if modality is Modality.AUDIO else found


def _valid_of(features: Features) -> Features:
    """The same without the vectors that a mask of the output says to be padding."""

    @wraps(features)  # whose parameters say what it takes
    def valid(**given: Any) -> Any:
        out = features(**given)
        mask = getattr(out, "attention_mask", None)
        return out if mask is None else out.pooler_output[mask]

    return valid


def _of_llama4(model: Any) -> Features:
    def get_image_features(pixel_values: Tensor, **options: Any) -> Tensor:
        """The vectors of tiles [n, channels, rows, columns]; transformers' method of this name is the tower alone."""
        found = model.get_image_features(pixel_values, **options).last_hidden_state
        vectors: Tensor = model.multi_modal_projector(found.flatten(0, 1))
        return vectors

    return get_image_features


def _of_qwen2_audio(model: Any) -> Features:
    def get_audio_features(input_features: Tensor, feature_attention_mask: Tensor, **options: Any) -> Tensor:
        """The vectors of clips [n, mel bins, frames], each padded behind its own frames, which the mask [n, frames] tells."""
        from transformers.masking_utils import create_bidirectional_mask

        tower = model.audio_tower
        seen, given = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        positions = (input_features.shape[-1] - 2) // 2 + 1
        empty = input_features.new_zeros(len(input_features), positions, 1)
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=empty, attention_mask=_first(seen, positions).long()
        )
        vectors: Tensor = model.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
        return vectors[_first(given, vectors.shape[1])]

    return get_audio_features


def _first(lengths: Tensor, positions: int) -> Tensor:
    """bool [n, positions]: true for the first `lengths` of each."""
    return torch.arange(positions, device=lengths.device) < lengths[:, None]
