"""From a config.json to transformers' configuration and the model's class. Code that comes with a model runs only if it is trusted."""

import json
from pathlib import Path
from typing import Any

from meshlm.protocol.model import TransformersSpec
from meshlm.runtime.errors import ModelFilesError

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SAMPLED_ROPE = ("dynamic", "longrope")


def quiet() -> None:
    """Warnings of transformers are for those who train; what matters here is checked."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def config_of(source: TransformersSpec, folder: Path) -> Any:
    """The configuration. ModelFilesError where transformers has none for it, or refuses a key."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, __version__

    values = json.loads(source.config)
    kind, named = values.get("model_type"), values.get("auto_map") or {}
    if kind in CONFIG_MAPPING:
        made = CONFIG_MAPPING[kind]
    elif "AutoConfig" not in named:
        raise ModelFilesError(f"transformers {__version__} knows no model_type {kind!r}")
    else:
        made = _own_code(named["AutoConfig"], folder, source)
    try:
        config = made.from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelFilesError(f"transformers refuses its config.json ({in_one_line(error)})") from None
    config._name_or_path = str(folder)
    if not _is_text(config):
        raise ModelFilesError("it is no model of text alone")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        raise ModelFilesError(
            f"layer_types has {', '.join(map(str, others))}; there are {', '.join(sorted(_LAYER_TYPES))}"
        )
    _check_rope(getattr(config, "rope_parameters", None))
    return config


def _is_text(config: Any) -> bool:
    try:
        return bool(config.get_text_config() is config)
    except ValueError:  # it has several
        return False


def class_of(config: Any, source: TransformersSpec, folder: Path) -> Any:
    """The class of the whole model, with its output projection. ModelFilesError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        named = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if named is None:
            raise ModelFilesError(f"transformers has no causal decoder of model_type {config.model_type!r}") from None
        found = _own_code(named, folder, source)
    if found.__name__ != source.architecture:
        raise ModelFilesError(f"transformers' causal decoder of model_type {config.model_type!r} is {found.__name__}")
    return found


def _own_code(name: str, folder: Path, source: TransformersSpec) -> Any:
    if not source.trust_remote_code:
        raise ModelFilesError(
            f"only code that comes with the model (auto_map {name}) knows it; --trust-remote-code runs that"
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if source.repository and "--" not in name:
        name = f"{source.repository}--{name}"
    try:
        return get_class_from_dynamic_module(name, str(folder), code_revision=source.code_revision or None)
    except (OSError, ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ModelFilesError(f"the code that comes with the model cannot be loaded ({in_one_line(error)})") from None


def _check_rope(settings: Any) -> None:
    """Some scalings look at the longest position of a batch: an answer would depend on the requests beside it."""
    if not isinstance(settings, dict):
        return
    for value in settings.values():
        _check_rope(value)
    if settings.get("rope_type") in _SAMPLED_ROPE:
        raise ModelFilesError(
            f"rope_type {settings['rope_type']}: with transformers' code an answer would depend on the requests beside it"
        )


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
