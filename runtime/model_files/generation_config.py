"""What a generation_config.json, or one given in its place, says: sampling defaults, a limit on output, tokens that end a text.

Called by the supervisor. Each key is read, has no effect on what is served, or is named once as not applied: a default is no reason
to refuse a model. The rules are vLLM's.
"""

from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.architectures.config_values import shown, words
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.json_files import parse_object, read_json

FILE = "generation_config.json"
Number = float | int
# Lowest and highest value, and whether the lowest is one; the same as a request's.
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, True),
    "top_p": (0, 1, False),
    "top_k": (-1, 1 << 31, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0, 100, False),
    "max_new_tokens": (1, 1 << 31, True),
}
_WHOLE = ("top_k", "max_new_tokens")
NEEDLESS = words("""
    transformers_version _from_model_config do_sample bos_token_id pad_token_id decoder_start_token_id use_cache
    cache_implementation cache_config max_cache_len compile_config disable_compile continuous_batching_config
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate low_memory
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
    prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp prefill_chunk_size
    remove_invalid_values early_stopping length_penalty
""")
"""Bookkeeping, how transformers runs, and settings of searches that are not asked for."""
_SEARCHES = "num_beams num_beam_groups num_return_sequences typical_p encoder_repetition_penalty guidance_scale"
NEUTRAL: dict[str, Number] = dict.fromkeys(words(_SEARCHES), 1)


class GenerationConfig(Struct, frozen=True, kw_only=True):
    """The settings of requests that give none."""

    defaults: dict[str, Number] = {}
    max_output_tokens: int | None = None  # that no request passes
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def with_eos(generation: GenerationConfig, of_tokenizer: int | None, vocab_size: int) -> GenerationConfig:
    """The tokenizer's end counts too: a finetuned model's may be known to it alone. Ids that no token has are named and dropped:
    whatever masks them would write past the logits."""
    ids = list(dict.fromkeys((*generation.eos_token_ids, *(() if of_tokenizer is None else (of_tokenizer,)))))
    outside = [token for token in ids if not 0 <= token < vocab_size]
    note = f"eos_token_id {', '.join(map(str, outside))} is ignored: the vocabulary has the ids 0 to {vocab_size - 1}"
    return msgspec.structs.replace(
        generation,
        eos_token_ids=tuple(token for token in ids if token not in outside),
        notes=(*generation.notes, note) if outside else generation.notes,
    )


def of_model(folder: Path, config: dict[str, Any], honoured: Set[str] = frozenset()) -> GenerationConfig:
    """A model's own: its generation_config.json, or where there is none what its config.json says. ModelFilesError.

    honoured: further keys, which are others' to read."""
    if (folder / FILE).is_file():
        settings, where = read_json(folder / FILE), str(folder / FILE)
        notes = _notes({name: value for name, value in settings.items() if name not in honoured}, where)
        if settings.get("eos_token_id") is None:
            settings["eos_token_id"] = config.get("eos_token_id")
    else:
        settings, where, notes = config, f"{folder}/config.json", ()
    ends = eos_ids(settings.get("eos_token_id"), where)
    return GenerationConfig(defaults=_defaults(settings, where), eos_token_ids=ends, notes=notes)


def chosen(own: GenerationConfig, source: str, override: str) -> GenerationConfig:
    """The GenerationConfig that --generation-config and --override-generation-config choose. ModelFilesError.

    A folder that a user names, and an override, limit what requests may ask for; a model's own file only gives defaults."""
    given = source not in ("auto", "meshlm", "vllm")
    found, eos, notes = own.defaults, own.eos_token_ids, own.notes
    if source in ("meshlm", "vllm"):
        found, notes = {}, ()
    elif given:
        path = Path(source)
        if not path.exists():
            raise ModelFilesError(f"--generation-config {path}: no such file or folder")
        file = path / FILE if path.is_dir() else path
        settings = read_json(file)
        found, notes = _defaults(settings, str(file)), _notes(settings, str(file))
        eos = eos_ids(settings.get("eos_token_id"), str(file)) or eos
    changes = _override(override) if override else {}
    found = found | changes
    limit = found.get("max_tokens") if given else changes.get("max_tokens")
    most = None if limit is None else int(limit)
    return GenerationConfig(defaults=found, max_output_tokens=most, eos_token_ids=eos, notes=notes)


def eos_ids(given: Any, where: str) -> tuple[int, ...]:
    """The tokens that end a text. ModelFilesError."""
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int for token in ids):
        raise ModelFilesError(f"{where}: eos_token_id must be a token id or a list of them, got {shown(given)}")
    return tuple(ids)


def _override(text: str) -> dict[str, Number]:
    flag = "--override-generation-config"
    changes = parse_object(text, flag)
    for name, value in changes.items():
        if name not in RANGES:
            raise ModelFilesError(f"{flag}: {name!r} is none of {', '.join(RANGES)}")
        if value is None:
            raise ModelFilesError(f"{flag}: {name} must be a number, got None")
    return _defaults(changes, flag)


def _defaults(settings: dict[str, Any], where: str) -> dict[str, Number]:
    found = {name: settings[name] for name in RANGES if settings.get(name) is not None}
    for name, value in found.items():
        low, high, closed = RANGES[name]
        if type(value) not in (int, float) or (name in _WHOLE and value != int(value)):
            raise ModelFilesError(f"{where}: {name} must be a number, got {shown(value)}")
        if not low <= value <= high or (value == low and not closed):
            border = f"at least {low}" if closed else f"above {low}"
            raise ModelFilesError(f"{where}: {name} is {value}; it must be {border} and {high} at most")
    return {
        ("max_tokens" if name == "max_new_tokens" else name): int(value) if name in _WHOLE else value
        for name, value in found.items()
    }


def _notes(settings: dict[str, Any], where: str) -> tuple[str, ...]:
    """One line about settings that are not applied, if any."""
    known = NEEDLESS | RANGES.keys() | {"eos_token_id"}
    others = {name: value for name, value in settings.items() if value and name not in known}
    ignored = sorted(name for name, value in others.items() if value != NEUTRAL.get(name))
    notes = [f"{where}: not applied: {', '.join(ignored)}"] if ignored else []
    if settings.get("do_sample") is False and settings.get("temperature") is None:
        text = "do_sample false is not applied: a request without temperature is sampled at 1 (0 is greedy)"
        notes.append(f"{where}: {text}")
    return tuple(notes)
