"""What a folder must say of a model that writes down audio, and what is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_whisper
from model_folders import resolve_model

from meshlm.runtime.errors import ModelFilesError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("whisper")
    small_whisper.made(found)
    return found


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    """Keys of a JSON file; None takes them out."""
    said = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"no_timestamps_token_id": None}, "no_timestamps_token_id must be a token id, got None"),
        ({"lang_to_id": None}, "lang_to_id and task_to_id are missing"),
        ({"lang_to_id": {"en": 2}}, "lang_to_id: 'en' is no token of a language"),
        ({"task_to_id": ["transcribe"]}, "task_to_id must be token ids by name"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens must be a list of token ids"),
        ({"suppress_tokens": [500]}, "token 500 is none of the 211 of the vocabulary"),
        ({"prev_sot_token_id": "a"}, "prev_sot_token_id must be a token id"),
    ],
)
def test_a_generation_config_that_cannot_be_followed(values: dict[str, Any], text: str, folder: Path) -> None:
    change(folder / "generation_config.json", **values)
    with pytest.raises(ModelFilesError, match=text.replace("[", r"\[")):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n_fft": 512}, "n_fft 512 is not supported, only 400"),
        ({"sampling_rate": 8000}, "sampling_rate 8000 is not supported, only 16000"),
        ({"feature_size": 80}, "feature_size 80 is not supported, only 20"),
        ({"chunk_length": 30}, "chunk_length 30 is not supported, only 1"),
    ],
)
def test_sounds_that_would_have_to_be_heard_otherwise(values: dict[str, Any], text: str, folder: Path) -> None:
    change(folder / "preprocessor_config.json", **values)
    with pytest.raises(ModelFilesError, match=text):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"encoder_attention_heads": 5}, "d_model 48 is no multiple of encoder_attention_heads 5"),
        ({"max_source_positions": 60}, "max_source_positions 60 are no whole number of seconds, of which each has 50"),
        ({"scale_embedding": True}, "scale_embedding True changes what the model computes"),
        ({"activation_function": "tanh"}, "activation_function"),
    ],
)
def test_a_config_that_cannot_be_honoured(values: dict[str, Any], text: str, folder: Path) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(ModelFilesError, match=text):
        resolve_model(str(folder))


def test_a_model_of_english_alone(folder: Path) -> None:
    change(folder / "generation_config.json", is_multilingual=False, lang_to_id=None, task_to_id=None)
    speech = resolve_model(str(folder)).speech
    assert speech is not None
    assert (speech.languages, speech.tasks) == ({}, {})


def test_nothing_of_it_is_said_to_be_ignored(folder: Path) -> None:
    change(folder / "generation_config.json", max_length=128, alignment_heads=[[0, 1]], return_timestamps=True)
    files = resolve_model(str(folder))
    assert not [note for note in (*files.notes, *files.generation.notes) if "not applied" in note]
