"""The images that a model takes beside text, read from the config.json of the whole model: its text part is text_part.py's."""

import json
from typing import Any, NamedTuple

from meshlm.architectures.config_values import shown
from meshlm.protocol.media import Modality
from meshlm.protocol.media_spec import MediaSpec


class _Family(NamedTuple):
    """A model whose images are served, by its architecture."""

    placeholder: int  # of images, where config.json names none
    section: tuple[int, ...] = ()  # M-RoPE: frequencies by axis, where config.json has none; (0,): it must have them
    interleaved: bool = False
    deepstack: bool = False
    uncut: bool = False
    in_windows: bool = False  # uncut_in_windows
    as_said: tuple[
        str, ...
    ] = ()  # uncut where use_bidirectional_attention is "vision"; (its value, where it is missing)


_FAMILIES = {
    "Qwen2VLForConditionalGeneration": _Family(151655, (0,)),
    "Qwen2_5_VLForConditionalGeneration": _Family(151655, (0,)),
    "Qwen3VLForConditionalGeneration": _Family(151655, (24, 20, 20), interleaved=True, deepstack=True),
    "Qwen3VLMoeForConditionalGeneration": _Family(151655, (24, 20, 20), interleaved=True, deepstack=True),
    "Qwen3_5ForConditionalGeneration": _Family(248056, (11, 11, 10), interleaved=True),
    "Qwen3_5MoeForConditionalGeneration": _Family(248056, (11, 11, 10), interleaved=True),
    "LlavaForConditionalGeneration": _Family(32000),
    "LlavaNextForConditionalGeneration": _Family(32000),
    "LlavaOnevisionForConditionalGeneration": _Family(151646),
    "Gemma3ForConditionalGeneration": _Family(262144, uncut=True),
    "Gemma4ForConditionalGeneration": _Family(258880, in_windows=True, as_said=("",)),
    "Gemma4UnifiedForConditionalGeneration": _Family(258880, as_said=("vision",)),
    "Idefics3ForConditionalGeneration": _Family(128257),
    "SmolVLMForConditionalGeneration": _Family(128257),
    "InternVLForConditionalGeneration": _Family(151667),
    "Mistral3ForConditionalGeneration": _Family(10),
}


def media_spec(config: dict[str, Any], hidden_size: int) -> MediaSpec | None:
    """What the model of this config.json, the whole one, sees; None: images of this architecture are not served. ValueError."""
    named = config.get("architectures") or [""]
    family, tower = _FAMILIES.get(named[0]), config.get("vision_config")
    if family is None or not isinstance(tower, dict):
        return None
    placeholder = next(
        (config[key] for key in ("image_token_id", "image_token_index") if config.get(key) is not None),
        family.placeholder,
    )
    if not isinstance(placeholder, int) or placeholder < 0:
        raise ValueError(f"image_token_id must be a token's id, got {shown(placeholder)}")
    indexes = tower.get("deepstack_visual_indexes", [8, 16, 24]) if family.deepstack else []
    return MediaSpec(
        architecture=named[0],
        config=json.dumps(config),
        tower=str(tower.get("model_type") or config.get("model_type")),
        hidden_size=hidden_size,
        placeholders=((Modality.IMAGE, placeholder),),
        deepstack=len(indexes),
        mrope_section=_section(config, family),
        mrope_interleaved=family.interleaved,
        is_uncut=family.uncut or _says_uncut(config, family),
        uncut_in_windows=family.in_windows,
    )


def _says_uncut(config: dict[str, Any], family: _Family) -> bool:
    text = config.get("text_config") or {}
    return any(text.get("use_bidirectional_attention", missing) == "vision" for missing in family.as_said)


def _section(config: dict[str, Any], family: _Family) -> tuple[int, ...]:
    if not family.section:
        return ()
    text = config.get("text_config") or config
    ropes = [one for key in ("rope_parameters", "rope_scaling") if isinstance(one := text.get(key), dict)]
    found = next((rope["mrope_section"] for rope in ropes if rope.get("mrope_section") is not None), family.section)
    if len(found) != 3 or not all(isinstance(one, int) and one >= 0 for one in found):
        raise ValueError(f"mrope_section must be three numbers, got {shown(list(found))}")
    return tuple(found)
