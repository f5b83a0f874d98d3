"""The files of a speech-to-text model: the tokens that tell it what to write, and the audio features that its encoder takes.

Called by the supervisor.
"""

import re
from pathlib import Path
from typing import Any

from meshlm.architectures.config_values import shown, words
from meshlm.protocol.audio import HOP, SAMPLE_RATE, WINDOW, SpeechTokens
from meshlm.protocol.model import AudioEncoderSpec, ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.generation_config import FILE
from meshlm.runtime.model_files.json_files import read_json

KEYS = words("""
    lang_to_id task_to_id is_multilingual no_timestamps_token_id prev_sot_token_id begin_suppress_tokens suppress_tokens
    return_timestamps forced_decoder_ids alignment_heads max_length max_initial_timestamp_index
""")
"""Of generation_config.json: read here, said by requests instead (return_timestamps, forced_decoder_ids), of times of words, which are
refused (alignment_heads), or the context itself (max_length)."""
PREPROCESSOR = "preprocessor_config.json"


def speech_tokens(folder: Path, spec: ModelSpec, config: dict[str, Any]) -> tuple[SpeechTokens, tuple[int, ...]]:
    """The tokens, and those that are never written. config: config.json, which says some of it where generation_config.json does not.

    ModelFilesError for what is missing, and for audio features that are not Whisper's."""
    assert spec.audio_encoder is not None
    _check_preprocessor(folder, spec.audio_encoder)
    where = folder / FILE
    settings = {**config, **(read_json(where) if where.is_file() else {})}
    languages, tasks = _ids(settings, "lang_to_id", where), _ids(settings, "task_to_id", where)
    if settings.get("is_multilingual") is not False and not (languages and tasks):
        text = "lang_to_id and task_to_id are missing; where is_multilingual is false they may be"
        raise ModelFilesError(f"{where}: {text}")
    if settings.get("is_multilingual") is False:
        languages, tasks = {}, {}
    start, without = (_id(settings, name, where) for name in ("decoder_start_token_id", "no_timestamps_token_id"))
    previous, latest = settings.get("prev_sot_token_id"), settings.get("max_initial_timestamp_index")
    found = SpeechTokens(
        start=start,
        languages={_code(name, where): token for name, token in languages.items()},
        tasks=tasks,
        no_timestamps=without,
        previous=-1 if previous is None else _id(settings, "prev_sot_token_id", where),
        begin_suppress_tokens=_list(settings, "begin_suppress_tokens", where),
        max_initial_timestamp_index=-1 if latest is None else _id(settings, "max_initial_timestamp_index", where),
        seconds=spec.audio_encoder.num_samples // SAMPLE_RATE,
    )
    never = _list(settings, "suppress_tokens", where)
    others = (start, without, *found.languages.values(), *tasks.values(), *found.begin_suppress_tokens, *never)
    if outside := [token for token in (*others, max(found.previous, 0)) if not 0 <= token < spec.vocab_size]:
        raise ModelFilesError(f"{where}: token {outside[0]} is none of the {spec.vocab_size} of the vocabulary")
    return found, never


def _check_preprocessor(folder: Path, speech: AudioEncoderSpec) -> None:
    if speech.num_samples % SAMPLE_RATE:
        raise ModelFilesError(
            f"{folder}/config.json: max_source_positions {speech.max_source_positions} are no whole number of seconds, "
            f"of which each has {SAMPLE_RATE // (2 * HOP)}"
        )
    if not (folder / PREPROCESSOR).is_file():
        return
    said = read_json(folder / PREPROCESSOR)
    wanted = {
        "feature_size": speech.num_mel_bins,
        "sampling_rate": SAMPLE_RATE,
        "n_fft": WINDOW,
        "hop_length": HOP,
        "chunk_length": speech.num_samples // SAMPLE_RATE,
        "dither": 0.0,
        "padding_value": 0.0,
        "do_normalize": False,
    }
    for name, value in wanted.items():
        if said.get(name, value) != value:
            raise ModelFilesError(f"{folder}/{PREPROCESSOR}: {name} {shown(said[name])} is not supported, only {value}")


def _code(name: str, where: Path) -> str:
    match = re.fullmatch(r"<\|(.+)\|>", name)
    if match is None:
        raise ModelFilesError(f"{where}: lang_to_id: {shown(name)} is no token of a language, as <|en|> is")
    return match[1]


def _id(settings: dict[str, Any], name: str, where: Path) -> int:
    if type(value := settings.get(name)) is not int:
        raise ModelFilesError(f"{where}: {name} must be a token id, got {shown(value)}")
    return value


def _ids(settings: dict[str, Any], name: str, where: Path) -> dict[str, int]:
    found = settings.get(name) or {}
    if not isinstance(found, dict) or any(type(token) is not int for token in found.values()):
        raise ModelFilesError(f"{where}: {name} must be token ids by name, got {shown(found)}")
    return found


def _list(settings: dict[str, Any], name: str, where: Path) -> tuple[int, ...]:
    found = settings.get(name) or []
    if not isinstance(found, list) or any(type(token) is not int for token in found):
        raise ModelFilesError(f"{where}: {name} must be a list of token ids, got {shown(found)}")
    return tuple(found)
