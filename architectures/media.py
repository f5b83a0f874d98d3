"""What a model takes beside text, images, videos and sounds: by the config.json of the whole model. Its text part is text_part.py's."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from meshlm.architectures.config_values import shown
from meshlm.architectures.text_part import reading_part
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec


class _Family(NamedTuple):
    """A model whose images, videos or sounds are served, by its architecture."""

    placeholder: int | None  # of images, where config.json names none; None: it sees none
    section: tuple[int, ...] = ()  # M-RoPE: frequencies by axis, where config.json has none; (0,): it must have them
    interleaved: bool = False
    deepstack: bool = False
    uncut: bool = False
    in_windows: bool = False  # uncut_in_windows
    as_said: tuple[
        str, ...
    ] = ()  # uncut where use_bidirectional_attention is "vision"; (its value, where it is missing)
    video: int | None = None  # the placeholder of videos, where config.json names none; None: it takes none ...
    video_as_images: bool = False  # ... but that a video's vectors take the places of tokens of images
    timed: bool = False  # is_timed
    audio: int | None = None  # the placeholder of sounds, where config.json names none; None: it hears none


_FAMILIES = {
    "Qwen2VLForConditionalGeneration": _Family(151655, (0,), video=151656),
    "Qwen2_5_VLForConditionalGeneration": _Family(151655, (0,), timed=True, video=151656),
    "Qwen3VLForConditionalGeneration": _Family(151655, (24, 20, 20), interleaved=True, deepstack=True, video=151656),
    "Qwen3VLMoeForConditionalGeneration": _Family(151655, (24, 20, 20), interleaved=True, deepstack=True, video=151656),
    "Qwen3_5ForConditionalGeneration": _Family(248056, (11, 11, 10), interleaved=True, video=248057),
    "Qwen3_5MoeForConditionalGeneration": _Family(248056, (11, 11, 10), interleaved=True, video=248057),
    "LlavaForConditionalGeneration": _Family(32000),
    "LlavaNextForConditionalGeneration": _Family(32000),
    "LlavaOnevisionForConditionalGeneration": _Family(151646, video=151647),
    "Gemma3ForConditionalGeneration": _Family(262144, uncut=True),
    "Gemma4ForConditionalGeneration": _Family(258880, in_windows=True, as_said=("",), audio=258881),
    "Gemma4UnifiedForConditionalGeneration": _Family(258880, as_said=("vision",), audio=258881),
    "Glm4vForConditionalGeneration": _Family(151343, (8, 12, 12)),
    "Glm4vMoeForConditionalGeneration": _Family(151363, (8, 12, 12)),
    "Glm46VForConditionalGeneration": _Family(151343, (8, 12, 12)),
    "GlmOcrForConditionalGeneration": _Family(59280, (8, 12, 12)),
    "Lfm2VlForConditionalGeneration": _Family(396),
    "PaddleOCRVLForConditionalGeneration": _Family(100295, (16, 24, 24)),
    "Llama4ForConditionalGeneration": _Family(200092),
    "DeepseekVLForConditionalGeneration": _Family(100015),
    "Cohere2VisionForConditionalGeneration": _Family(255036),
    "Idefics3ForConditionalGeneration": _Family(128257),
    "SmolVLMForConditionalGeneration": _Family(128257),
    "InternVLForConditionalGeneration": _Family(151667, video_as_images=True),
    "Mistral3ForConditionalGeneration": _Family(10),
    "Qwen2AudioForConditionalGeneration": _Family(None, audio=151646),
    "AudioFlamingo3ForConditionalGeneration": _Family(None, audio=151669),
    "VoxtralForConditionalGeneration": _Family(None, audio=24),
    "Qwen2_5OmniThinkerForConditionalGeneration": _Family(151655, (0,), audio=151646),
}
_TOWERS = {Modality.IMAGE: "vision_config", Modality.AUDIO: "audio_config"}


def media_spec(config: dict[str, Any], hidden_size: int) -> MediaSpec | None:
    """What the model of this config.json, the whole one, sees and hears; None: nothing beside text is served of it. ValueError."""
    config = reading_part(config)
    named = config.get("architectures") or [""]
    family = _FAMILIES.get(named[0])
    if family is None:
        return None
    defaults = {Modality.IMAGE: family.placeholder, Modality.AUDIO: family.audio}
    towers = {
        one: tower
        for one, default in defaults.items()
        if default is not None and isinstance(tower := config.get(_TOWERS[one]), dict)
    }
    if not towers:
        return None
    indexes = towers[Modality.IMAGE].get("deepstack_visual_indexes", [8, 16, 24]) if family.deepstack else []
    return MediaSpec(
        architecture=named[0],
        config=json.dumps(config),
        tower=str(next(iter(towers.values())).get("model_type") or config.get("model_type")),
        hidden_size=hidden_size,
        placeholders=_placeholders(config, family, towers),
        deepstack=len(indexes),
        mrope_section=_section(config, family),
        mrope_interleaved=family.interleaved,
        is_timed=family.timed,
        is_uncut=family.uncut or _says_uncut(config, family),
        uncut_in_windows=family.in_windows,
    )


def _says_uncut(config: dict[str, Any], family: _Family) -> bool:
    text = config.get("text_config") or {}
    return any(text.get("use_bidirectional_attention", missing) == "vision" for missing in family.as_said)


def _placeholders(
    config: dict[str, Any], family: _Family, modalities: Iterable[Modality]
) -> tuple[tuple[Modality, int], ...]:
    """By modality: of what the towers are for; and of videos, which the tower of images encodes."""
    defaults = {Modality.IMAGE: family.placeholder, Modality.AUDIO: family.audio}
    found = {one: _placeholder(config, one, defaults[one]) for one in modalities}
    if Modality.IMAGE in found and family.video_as_images:
        found[Modality.VIDEO] = found[Modality.IMAGE]
    elif Modality.IMAGE in found and family.video is not None:
        found[Modality.VIDEO] = _placeholder(config, Modality.VIDEO, family.video)
    return tuple(found.items())


def _placeholder(config: dict[str, Any], modality: Modality, default: int | None) -> int:
    names = f"{modality}_token_id", f"{modality}_token_index"
    found = next((config[key] for key in names if config.get(key) is not None), default)
    if not isinstance(found, int) or found < 0:
        raise ValueError(f"{names[0]} must be a token's id, got {shown(found)}")
    return found


def _section(config: dict[str, Any], family: _Family) -> tuple[int, ...]:
    if not family.section:
        return ()
    text = config.get("text_config") or config
    ropes = [one for key in ("rope_parameters", "rope_scaling") if isinstance(one := text.get(key), dict)]
    found = next((rope["mrope_section"] for rope in ropes if rope.get("mrope_section") is not None), family.section)
    if len(found) != 3 or not all(isinstance(one, int) and one >= 0 for one in found):
        raise ValueError(f"mrope_section must be three numbers, got {shown(list(found))}")
    return tuple(found)
